"""te.LayerNorm."""

from __future__ import annotations

from apex.transformer_engine.pytorch.module._norm import _Norm


class LayerNorm(_Norm):
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

    kind = "LayerNorm"
