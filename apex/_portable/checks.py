"""Checks of arguments: `value(ok, text, *parts)` raises ValueError unless ok. The text is formatted only then, and
shapes and dtypes read as the compiled bindings print them."""

from __future__ import annotations

import torch

from apex._portable.tensors import F64, code_of, dtype_name


def _show(part):
    if isinstance(part, torch.dtype):
        return dtype_name(part)
    if isinstance(part, (torch.Size, tuple)):
        return f"[{', '.join(map(str, part))}]"
    return f"{part:g}" if isinstance(part, float) else str(part)


def value(ok, text, *parts):
    if not ok:
        raise ValueError(text.format(*map(_show, parts)))


def type_(ok, text, *parts):
    if not ok:
        raise TypeError(text.format(*map(_show, parts)))


def index(ok, text, *parts):
    if not ok:
        raise IndexError(text.format(*map(_show, parts)))


def is_index(tensor):
    return tensor.dtype in (torch.int64, torch.int32)


def float64_alone(op, what, tensor, input, name):
    """Raises TypeError where one of the two is float64 and the other is not."""
    code_of(op, tensor.dtype)
    type_(
        (tensor.dtype is F64) == (input.dtype is F64),
        "{}: float64 goes with float64 alone: the input is {}, the {} {}",
        op, input.dtype, name, tensor.dtype,
    )  # fmt: skip
