"""te.RMSNorm."""

from __future__ import annotations

import torch
from torch import nn

from apex import _symbolic as symbolic
from apex.transformer_engine.pytorch import _parameters
from apex.transformer_engine.pytorch.module.layernorm import norm_vector, normalize


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * gamma, over the last dimension.

    Args:
        hidden_size: size of the last dimension.
        eps: as above.
        sequence_parallel: marks the parameter: each rank has its own part's gradient.
        params_dtype: of the parameter; None: torch's default.
        zero_centered_gamma: gamma is 1 + weight, which begins at 0.
        device: None: the current GPU, or the CPU where there is none.

    Attributes:
        weight: [hidden_size].
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

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Of inp's shape and dtype."""
        node = symbolic.leaf(self, inp)
        if node is not None:
            return node
        return normalize("RMSNorm", inp, self.weight, None, self.eps, self.zero_centered_gamma)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"
