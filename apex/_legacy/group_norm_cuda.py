"""The functions of public apex's group_norm_cuda. They record no gradients, as there."""

from __future__ import annotations

import torch

from apex._legacy._raw import raw as _raw
from apex._loader import bindings
from apex.contrib.group_norm.group_norm import statistics_of, sums_of

bindings.load()
_ops = torch.ops.apex

__all__ = ["backward", "forward"]


def _check_passes(passes):
    if passes not in (1, 2):
        raise ValueError(f"group_norm_cuda: passes must be 1 or 2, not {passes}")


@_raw
def forward(input, groups, weight, bias, eps, passes, with_swish=False):
    """[group norm of the input, sums]; sums: [2 * batch * groups] float32, mean and mean of squares by turns.

    passes: 1 or 2, which kernels public apex takes; here the op chooses by itself.
    """
    _check_passes(passes)
    output, mean, rstd = _ops.group_norm_forward(input, groups, weight, bias, eps, with_swish)
    return [output, sums_of(mean, rstd, eps, of_squares=True)]


@_raw
def backward(grad_output, sums, input, groups, weight, bias, eps, passes, with_swish=False):
    """[gradient of the input, of the weight, of the bias]; sums: of the forward."""
    _check_passes(passes)
    mean, rstd = statistics_of(sums, input.shape[0], groups, eps, input.dtype, of_squares=True)
    return list(
        _ops.group_norm_backward(grad_output, input, mean, rstd, groups, weight, bias, eps, with_swish)
    )
