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


def like(op, name, tensor, shape, dtype=None, whose=""):
    """Raises unless a tensor has this shape, and that dtype if one is given; None is left to others. whose: the shape,
    as "the input's "."""
    if tensor is None:
        return
    value(tensor.shape == shape, "{}: {} has shape {}, not {}{}", op, name, tensor.shape, whose, tuple(shape))
    type_(
        dtype is None or tensor.dtype is dtype,
        "{}: {} has dtype {}, not {}{}", op, name, tensor.dtype, whose, dtype,
    )  # fmt: skip


def labelled(op, logits, name, labels):
    """Raises unless there is a label for each row of logits."""
    code_of(op, logits.dtype)
    value(
        logits.dim() >= 1 and labels.shape == logits.shape[:-1],
        "{}: logits of shape {} need {} of the same shape without the last dimension, not {}",
        op, logits.shape, name, labels.shape,
    )  # fmt: skip
    type_(is_index(labels), "{}: {} are int64 or int32, not {}", op, name, labels.dtype)


def seed_for(op, dropout, seed, input):
    """Raises unless dropout has the seed that it needs."""
    fits = seed is not None and seed.dtype is torch.int64 and seed.numel() == 1
    value(dropout == 0 or fits, "{}: dropout needs a seed, one int64 on {}", op, input.device)


def affine(op, weight, bias, input, channels):
    """Raises unless these, or None, hold a number for each channel, of a dtype that goes with the input's."""
    for name, w in (("weight", weight), ("bias", bias)):
        if w is not None:
            like(op, name, w, (channels,), None, "a number each channel, ")
            float64_alone(op, name, w, input, name)
    one = weight is None or bias is None or weight.dtype is bias.dtype
    type_(one, "{}: weight and bias must have one dtype", op)


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
