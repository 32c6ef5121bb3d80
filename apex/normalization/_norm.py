"""The norms' ops as functions, with the rule for dtypes that differ."""

from __future__ import annotations

import torch

from apex._functional import call

_ops = torch.ops.apex


def layer_norm(input, normalized_shape, weight, bias, eps, memory_efficient, dtype=None):
    """Layer norm over the last dimensions; dtype: the output's, by default the input's."""
    return call(
        "layer_norm",
        _ops.layer_norm_forward.default,
        1,
        (input, normalized_shape, weight, bias, eps, memory_efficient, dtype),
    )


def rms_norm(input, normalized_shape, weight, eps, memory_efficient, dtype=None):
    """RMS norm over the last dimensions."""
    return call(
        "rms_norm",
        _ops.rms_norm_forward.default,
        1,
        (input, normalized_shape, weight, eps, memory_efficient, dtype),
    )


def add_layer_norm(input, residual, normalized_shape, weight, bias, eps, memory_efficient, dtype=None):
    """(layer norm of the sum, the sum)"""
    return call(
        "add_layer_norm",
        _ops.add_layer_norm_forward.default,
        2,
        (input, residual, normalized_shape, weight, bias, eps, memory_efficient, dtype),
    )


def add_rms_norm(input, residual, normalized_shape, weight, eps, memory_efficient, dtype=None):
    """(RMS norm of the sum, the sum)"""
    return call(
        "add_rms_norm",
        _ops.add_rms_norm_forward.default,
        2,
        (input, residual, normalized_shape, weight, eps, memory_efficient, dtype),
    )


def check_one_dtype(name, input, weight):
    """Raises TypeError where input and weight differ outside autocast: the Mixed* classes are for that."""
    if weight.dtype != input.dtype and not torch.is_autocast_enabled(input.device.type):
        raise TypeError(
            f"{name}: the input is {input.dtype} but the weight {weight.dtype}; "
            f"Mixed{name} takes both (its output has the weight's dtype)"
        )


def as_shape(normalized_shape):
    """A tuple of what may be one int."""
    return (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
