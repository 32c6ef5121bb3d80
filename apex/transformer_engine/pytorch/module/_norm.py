"""The norms of apex.transformer_engine: their parameters and call, alone and at the beginning of a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from apex import _symbolic as symbolic
from apex.normalization import _norm
from apex.transformer_engine.pytorch import _parameters
from apex.transformer_engine.pytorch._norms import Norm
from apex.transformer_engine.pytorch._state import current


def check_normalization(kind: str) -> None:
    """Raises ValueError for a norm that there is not."""
    if kind not in ("LayerNorm", "RMSNorm"):
        raise ValueError(f"normalization must be 'LayerNorm' or 'RMSNorm', not {kind!r}")


def add_norm(layer, prefix, kind, size, zero_centered_gamma, dtype, device, sequence_parallel):
    """Adds a norm's weight and bias to a layer; an RMS norm has no bias."""
    values = {"weight": 0.0 if zero_centered_gamma else 1.0}
    if kind == "LayerNorm":
        values["bias"] = 0.0
    for name, value in values.items():
        made = _parameters.add_vector(layer, prefix + name, size, value, dtype, device)
        made.sequence_parallel = sequence_parallel


def normalize(kind, input, weight, bias, eps, zero_centered_gamma):
    """Layer or RMS norm over the last dimension, of the input's dtype, autocast's within one.

    kind: "LayerNorm" or "RMSNorm". zero_centered_gamma: the weight is gamma - 1; the sum is made in float32.
    """
    if zero_centered_gamma:
        weight = weight.to(torch.float32) + 1.0
        bias = None if bias is None else bias.to(torch.float32)
    if kind == "RMSNorm":
        return _norm.rms_norm(input, (input.shape[-1],), weight, eps, False)
    return _norm.layer_norm(input, (input.shape[-1],), weight, bias, eps, False)


class _Norm(nn.Module):
    """What LayerNorm and RMSNorm have in common; `kind` is the name of either."""

    kind: str

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.eps, self.zero_centered_gamma = hidden_size, eps, zero_centered_gamma
        add_norm(
            *(
                self,
                "",
                self.kind,
                hidden_size,
                zero_centered_gamma,
                params_dtype,
                _parameters.device_of(device),
            ),
            sequence_parallel,
        )

    def reset_parameters(self, defer_init: bool | None = False) -> None:
        """Parameters begin anew; those on the meta device are made on the current GPU, or on the CPU."""
        _parameters.reset(self)

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Of inp's shape and dtype."""
        node = symbolic.leaf(self, inp)
        if node is not None:
            return node
        bias = getattr(self, "bias", None)
        return normalize(self.kind, inp, self.weight, bias, self.eps, self.zero_centered_gamma)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class _NormFirst(nn.Module):
    """A layer that begins with a norm: its parameters, and the call of the layer around `_products`.

    `_products(entered, is_first_microbatch, norm)` is what the layer makes of the norm's output, or of the input and
    the norm; `_returned_bias()` what it gives beside that with return_bias.
    """

    def _make_norm(self, kind, eps, zero_centered_gamma, size, dtype, device, sequence_parallel):
        self.normalization, self.eps, self.zero_centered_gamma = kind, eps, zero_centered_gamma
        options = kind, size, zero_centered_gamma, dtype, device, sequence_parallel
        add_norm(self, "layer_norm_", *options)
        if kind == "RMSNorm":
            self.register_parameter("layer_norm_bias", None)

    def _run(self, inp: torch.Tensor, is_first_microbatch: bool | None) -> Any:
        """The output; behind it, where asked for, the bias and the norm's output."""
        node = symbolic.leaf(self, inp, is_first_microbatch=is_first_microbatch)
        if node is not None:
            return node
        norm, normed = self._norm_of_cast(), None
        if norm is None:
            normed = normalize(
                self.normalization,
                *(inp, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.zero_centered_gamma),
            )
        entered = inp if normed is None else self._sharing.enter(normed)
        found = [self._products(entered, is_first_microbatch, norm)]
        if self.return_bias:
            found.append(self._returned_bias())
        if self.return_layernorm_output:
            found.append(entered if self.return_layernorm_output_gathered else normed)
        return found[0] if len(found) == 1 else tuple(found)

    def _norm_of_cast(self):
        """norm_of_cast of this layer's; None where its output is returned, too."""
        if self.return_layernorm_output:
            return None
        parts = self.layer_norm_weight, self.layer_norm_bias
        return norm_of_cast(self.normalization, self.eps, self.zero_centered_gamma, *parts, self._sharing)


def norm_of_cast(kind, eps, zero_centered_gamma, weight, bias, sharing):
    """(Norm, gamma, beta) where one pass makes a norm and the cast of what it gives, else None.

    sharing: of the layer that multiplies it. Current and block scaling look for magnitudes before they cast, so the
    norm has to be there; so it has to be where it is sent to other ranks, or multiplied without FP8.
    """
    if not current.fuses(delayed=True) or sharing.sequence:
        return None
    norm = Norm(kind == "LayerNorm", eps, zero_centered_gamma, sharing.group_of_gradients())
    return norm, weight, bias
