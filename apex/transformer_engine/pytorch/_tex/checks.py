"""What the functions of transformer_engine_extensions ask of their arguments before anything else, by their names."""

from __future__ import annotations

import functools
import inspect

import torch

from apex._legacy import _raw
from apex.transformer_engine.pytorch._tex import casts

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.uint8, torch.int8, *casts.FP8)
TENSORS = frozenset(
    (
        "input", "grad_output", "gelu_input", "output", "input_cast", "input_transpose", "ln_out", "weight", "dz", "x",
        "mu", "rsigma", "gamma", "A", "B", "D",
    )
)  # fmt: skip
# Of single functions: elsewhere these are flags, or may be left out.
ALSO = {"bias": "layernorm_", "grad": "d"}
NUMBERS = frozenset(
    ("scale", "amax", "scale_inv", "noop", "A_scale_inverse", "B_scale_inverse", "D_scale", "D_amax")
)
LISTS = frozenset(
    ("input_list", "scale_list", "cast_output_list", "transposed_output_list", "amax_output_list")
)


def raw(function):
    """As _legacy._raw, of a function whose tensors were looked at. It raises TypeError or ValueError."""
    name, parameters = function.__name__, list(inspect.signature(function).parameters)
    asked = [(place, what, _check_of(name, what)) for place, what in enumerate(parameters)]
    asked = [row for row in asked if row[2] is not None]

    @functools.wraps(function)
    def run(*arguments, **keywords):
        device = None
        for place, what, check in asked:
            value = arguments[place] if place < len(arguments) else keywords.get(what)
            if place >= len(arguments) and what not in keywords:
                continue  # Python says that it is missing, or its default is right
            for tensor in check(name, what, value):
                device = device or tensor.device
                if tensor.device != device:
                    raise ValueError(f"{name}: {what} must be on {device}, not on {tensor.device}")
        return function(*arguments, **keywords)

    return _raw.raw(run)


def _check_of(name, what):
    if what in TENSORS or (what in ALSO and name.startswith(ALSO[what])):
        return _tensor
    return _number if what in NUMBERS else _list if what in LISTS else None


def _tensor(name, what, value):
    """[it]"""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: {what} must be a tensor, not {type(value).__name__}")
    if value.layout != torch.strided:
        raise TypeError(f"{name}: {what} must be dense, not {value.layout}")
    if value.dtype not in DTYPES:
        raise TypeError(f"{name}: {what} must hold floating-point numbers or bytes, not {value.dtype}")
    if value.dim() == 0:
        raise ValueError(f"{name}: {what} must have a dimension")
    return [value]


def _number(name, what, value):
    """[it], or none where it is none, or has no element"""
    if value is None:
        return []
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: {what} must be a tensor of one element, not {type(value).__name__}")
    if value.numel() == 0:
        return []
    if value.numel() > 1 or value.layout != torch.strided:
        raise ValueError(f"{name}: {what} must have one element, not {list(value.shape)}")
    if value.dtype != torch.float32:
        raise TypeError(f"{name}: {what} must be float32, not {value.dtype}")
    return [value]


def _list(name, what, value):
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, torch.Tensor) for one in value):
        raise TypeError(f"{name}: {what} must be a list of tensors, not {type(value).__name__}")
    return []
