"""The norms' ops as functions, with the rule for dtypes that differ."""

from __future__ import annotations

import warnings

import torch
from torch.fx import Proxy

from apex._functional import call, dispatch, entry, is_autocast_enabled, is_traced
from apex._loader import library

_ops = torch.ops.apex
_layer_norm, _rms_norm = entry("layer_norm"), entry("rms_norm")
_has_torch_function = torch.overrides.has_torch_function_variadic


def layer_norm(input, normalized_shape, weight, bias, eps, memory_efficient, dtype=None):
    """Layer norm over the last dimensions; dtype: the output's, by default the input's."""
    if is_traced():
        arguments = (input, normalized_shape, weight, bias, eps, memory_efficient, dtype)
        return dispatch(_ops.layer_norm_forward.default, arguments)[0]
    return eager_layer_norm(input, normalized_shape, weight, bias, eps, memory_efficient, dtype)


def eager_layer_norm(input, normalized_shape, weight, bias, eps, memory_efficient, dtype=None):
    """layer_norm where nothing compiles."""
    if _layer_norm is None or _has_torch_function(input, weight, bias):
        return _ops.layer_norm_forward.default(
            input, normalized_shape, weight, bias, eps, memory_efficient, dtype
        )[0]
    try:
        return _layer_norm(input, normalized_shape, weight, bias, eps, memory_efficient, dtype)
    except RuntimeError as error:
        library.raise_stored(error)  # the probe's own exception, if it refused to choose
        raise


def rms_norm(input, normalized_shape, weight, eps, memory_efficient, dtype=None):
    """RMS norm over the last dimensions."""
    if is_traced():
        arguments = (input, normalized_shape, weight, eps, memory_efficient, dtype)
        return dispatch(_ops.rms_norm_forward.default, arguments)[0]
    return eager_rms_norm(input, normalized_shape, weight, eps, memory_efficient, dtype)


def eager_rms_norm(input, normalized_shape, weight, eps, memory_efficient, dtype=None):
    """rms_norm where nothing compiles."""
    if _rms_norm is None or _has_torch_function(input, weight):
        return _ops.rms_norm_forward.default(input, normalized_shape, weight, eps, memory_efficient, dtype)[0]
    try:
        return _rms_norm(input, normalized_shape, weight, eps, memory_efficient, dtype)
    except RuntimeError as error:
        library.raise_stored(error)
        raise


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
    """Raises TypeError where input and weight differ outside autocast: the Mixed* classes are for that.

    But a half input may have float32 weights, as behind a linear layer of amp's O1 or of autocast: the output has the
    input's dtype.
    """
    if isinstance(input, Proxy):  # of torch.fx: the dtype is not known yet
        return
    if weight.dtype in (input.dtype, torch.float32) or is_autocast_enabled(input.device.type):
        return
    raise TypeError(
        f"{name}: the input is {input.dtype} but the weight {weight.dtype}; "
        f"Mixed{name} takes both (its output has the weight's dtype)"
    )


def as_shape(normalized_shape):
    """A tuple of what may be one int."""
    if torch.jit.is_tracing():  # sizes are tensors there, and ops of a library take numbers alone
        return _numbers(normalized_shape)
    if isinstance(normalized_shape, tuple):  # a torch.Size is one
        return normalized_shape
    return (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)


def _numbers(normalized_shape):
    sizes = normalized_shape if isinstance(normalized_shape, (tuple, list)) else (normalized_shape,)
    with warnings.catch_warnings():
        # Of constants in the trace, which these are as weights are.
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        return tuple(int(size) for size in sizes)


def parameter(module, name):
    """module.<name>, past torch.nn.Module.__getattr__, which costs a third of a microsecond.

    FSDP and parametrizations keep a parameter elsewhere; then the attribute is asked.
    """
    try:
        return module._parameters[name]
    except KeyError:
        return getattr(module, name)
