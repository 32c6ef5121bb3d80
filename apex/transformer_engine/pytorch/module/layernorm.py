"""te.LayerNorm."""

from __future__ import annotations

import torch
from torch import nn

from apex import _symbolic as symbolic
from apex.normalization import _norm
from apex.transformer_engine.pytorch import _parameters


def norm_vector(value, size, dtype, device, sequence_parallel):
    """gamma or beta."""
    made = _parameters.vector(size, value, dtype, device)
    made.sequence_parallel = sequence_parallel
    return made


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


def check_normalization(kind: str) -> None:
    """Raises ValueError for a norm that there is not."""
    if kind not in ("LayerNorm", "RMSNorm"):
        raise ValueError(f"normalization must be 'LayerNorm' or 'RMSNorm', not {kind!r}")


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * gamma + beta, over the last dimension.

    Args:
        hidden_size: size of the last dimension.
        eps: as above.
        sequence_parallel: marks the parameters: each rank has its own part's gradient.
        params_dtype: of the parameters; None: torch's default.
        zero_centered_gamma: gamma is 1 + weight, which begins at 0.
        device: None: the current GPU, or the CPU where there is none.

    Attributes:
        weight, bias: [hidden_size].
    """

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
        place, first = _parameters.device_of(device), 0.0 if zero_centered_gamma else 1.0
        self.weight = norm_vector(first, hidden_size, params_dtype, place, sequence_parallel)
        self.bias = norm_vector(0.0, hidden_size, params_dtype, place, sequence_parallel)

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Of inp's shape and dtype."""
        node = symbolic.leaf(self, inp)
        if node is not None:
            return node
        return normalize("LayerNorm", inp, self.weight, self.bias, self.eps, self.zero_centered_gamma)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"
