"""A norm that is made in the same pass as the cast of what it gives."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from apex._functional import dispatch
from apex.transformer_engine.pytorch._parallel import summed
from apex.transformer_engine.pytorch._quantizers import Delayed, Quantized

_layer_norm_backward = torch.ops.apex.layer_norm_backward.default
_rms_norm_backward = torch.ops.apex.rms_norm_backward.default


class Statistics(NamedTuple):
    """Of the rows of a matrix [m, k]: float32 [m]; an RMS norm has no mean."""

    mean: torch.Tensor | None
    rstd: torch.Tensor


class Norm(NamedTuple):
    """Of the rows of a matrix.

    Args:
        centered: layer norm, else RMS norm.
        eps: as of the norms.
        zero_centered_gamma: gamma is 1 + weight.
        group: the ranks whose gradients of the norm's output add up; None: this one alone.
    """

    centered: bool
    eps: float
    zero_centered_gamma: bool
    group: dist.ProcessGroup | None = None

    def quantize(
        self,
        quantizer: Delayed,
        matrix: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        columns: bool,
    ) -> tuple[Quantized, Statistics]:
        """The norm in FP8, with its transpose where `columns`. weight, bias: [k]."""
        options = self.eps, self.centered, self.zero_centered_gamma
        found, mean, rstd = quantizer.quantize_norm(matrix, weight, bias, options, columns)
        return found, Statistics(mean, rstd)

    def gradients(
        self,
        grad: torch.Tensor,
        matrix: torch.Tensor,
        statistics: Statistics,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        of_parameters: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """(of the matrix, of the weight, of the bias) from that of the norm's output; None without of_parameters."""
        if self.group is not None:
            grad = summed(grad, self.group)
        gamma, beta = weight, bias
        if self.zero_centered_gamma:  # the norms' backward takes one dtype for both
            gamma = weight.to(torch.float32) + 1.0
            beta = None if bias is None else bias.to(torch.float32)
        shape, rest = [matrix.shape[1]], (self.eps, False, matrix.dtype, of_parameters)
        if self.centered:
            arguments = [grad, matrix, *statistics, shape, gamma, beta, *rest]
            of_matrix, *others = dispatch(_layer_norm_backward, arguments)
        else:
            arguments = [grad, matrix, statistics.rstd, shape, gamma, *rest]
            of_matrix, *others = dispatch(_rms_norm_backward, arguments)
        if not of_parameters:
            return of_matrix, None, None
        return of_matrix, others[0].to(weight.dtype), None if bias is None else others[1].to(bias.dtype)
