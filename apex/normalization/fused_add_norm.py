"""Residual add and norm in one pass over memory. Public apex has no such function."""

from __future__ import annotations

from apex.normalization import _norm


def fused_add_layer_norm(
    input, residual, weight=None, bias=None, normalized_shape=None, eps=1e-5, memory_efficient=False
):
    """(layer_norm(input + residual), input + residual), both in the input's dtype.

    The sum is rounded to that dtype before it is normalised, as two separate ops would. normalized_shape: by
    default the weight's shape. memory_efficient: see FusedLayerNorm. The outputs are differentiable. Raises
    ValueError where shapes, TypeError where dtypes do not fit.
    """
    shape = _norm.as_shape(weight.shape if normalized_shape is None else normalized_shape)
    return _norm.add_layer_norm(input, residual, shape, weight, bias, eps, memory_efficient)


def fused_add_rms_norm(input, residual, weight=None, normalized_shape=None, eps=1e-5, memory_efficient=False):
    """(rms_norm(input + residual), input + residual); see fused_add_layer_norm."""
    shape = _norm.as_shape(weight.shape if normalized_shape is None else normalized_shape)
    return _norm.add_rms_norm(input, residual, shape, weight, eps, memory_efficient)
