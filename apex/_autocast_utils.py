"""Casts as autocast makes them, for functions that autocast does not know."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from apex._functional import is_autocast_enabled

__all__ = ["_cast_if_autocast_enabled", "_get_autocast_dtypes"]


def _get_autocast_dtypes() -> list[torch.dtype]:
    """Those that autocast takes here: float16, and bfloat16 but on GPUs that lack it."""
    lacks = torch.cuda.is_available() and not torch.cuda.is_bf16_supported()
    return [torch.float16] if lacks else [torch.float16, torch.bfloat16]


def _cast_if_autocast_enabled(*args):
    """The tuple of arguments; float tensors, also in lists, tuples and dicts, are in autocast's dtype where it is on.

    Left as they are: float64, tensors on a kind of device for which autocast is off, and everything else.
    """
    return tuple(_cast(value) for value in args)


def _cast(value):
    if isinstance(value, torch.Tensor):
        kind = value.device.type
        if value.is_floating_point() and value.dtype != torch.float64 and is_autocast_enabled(kind):
            return value.to(torch.get_autocast_dtype(kind))
        return value
    if isinstance(value, Mapping):
        return {key: _cast(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_cast, value))
    return type(value)(map(_cast, value)) if isinstance(value, (list, tuple)) else value
