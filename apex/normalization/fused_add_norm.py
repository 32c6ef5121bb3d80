"""Residual add and norm in one pass over memory. Public apex has no such function."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from apex.normalization import _norm


def fused_add_layer_norm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    normalized_shape: int | Sequence[int] | None = None,
    eps: float = 1e-5,
    memory_efficient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(layer_norm(input + residual), input + residual), both in the input's dtype.

    The sum is rounded to that dtype before it is normalised, as two separate ops would. normalized_shape: by
    default the weight's shape. memory_efficient: see FusedLayerNorm. The outputs are differentiable. Raises
    ValueError where shapes, TypeError where dtypes do not fit.
    """
    shape = _shape("fused_add_layer_norm", weight, normalized_shape)
    return _norm.add_layer_norm(input, residual, shape, weight, bias, eps, memory_efficient)


def fused_add_rms_norm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    normalized_shape: int | Sequence[int] | None = None,
    eps: float = 1e-5,
    memory_efficient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(input + residual), input + residual); see fused_add_layer_norm."""
    shape = _shape("fused_add_rms_norm", weight, normalized_shape)
    return _norm.add_rms_norm(input, residual, shape, weight, eps, memory_efficient)


def _shape(
    name: str, weight: torch.Tensor | None, normalized_shape: int | Sequence[int] | None
) -> tuple[int, ...]:
    if normalized_shape is not None:
        return _norm.as_shape(normalized_shape)
    if weight is None:
        raise ValueError(f"{name}: without a weight normalized_shape says what is normalised; both are None")
    return _norm.as_shape(weight.shape)
