"""apex's layer norms with the attribute `sequence_parallel_enabled` on module and parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from apex import normalization
from apex.contrib import layer_norm as fast


def _mark(module, enabled):
    module.sequence_parallel_enabled = enabled
    for parameter in module.parameters():
        parameter.sequence_parallel_enabled = enabled


class FusedLayerNorm(normalization.FusedLayerNorm):
    """apex.normalization.FusedLayerNorm, marked."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        *,
        sequence_parallel_enabled: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)
        _mark(self, sequence_parallel_enabled)


class MixedFusedLayerNorm(normalization.MixedFusedLayerNorm):
    """apex.normalization.MixedFusedLayerNorm, marked."""

    def __init__(self, normalized_shape: int | Sequence[int], eps: float = 1e-5, **kwargs: Any) -> None:
        enabled = kwargs.pop("sequence_parallel_enabled", False)
        super().__init__(normalized_shape, eps, **kwargs)
        _mark(self, enabled)


class FastLayerNorm(fast.FastLayerNorm):
    """apex.contrib.layer_norm.FastLayerNorm, marked."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, *, sequence_parallel_enabled: bool = False
    ) -> None:
        super().__init__(hidden_size, eps)
        _mark(self, sequence_parallel_enabled)
