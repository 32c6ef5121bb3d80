"""te.RMSNorm."""

from __future__ import annotations

from apex.transformer_engine.pytorch.module._norm import _Norm


class RMSNorm(_Norm):
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

    kind = "RMSNorm"
