"""Positional arguments of amp.initialize, of which public apex has two orders."""

from __future__ import annotations

import functools
import inspect

import torch

from apex.amp._errors import warn

_AMBIGUOUS = 6  # patch_torch_functions_type here and in ROCm's apex, keep_batchnorm_fp32 in NVIDIA's


def takes_nvidia_order(function):
    """Positional arguments in NVIDIA's order, which lacks patch_torch_functions_type, are understood."""
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def initialize(*args, **kwargs):
        if len(args) > _AMBIGUOUS and _is_nvidia_order(args):
            warn(
                "amp.initialize: its seventh positional argument is patch_torch_functions_type (ROCm's), "
                f"but {args[_AMBIGUOUS]!r} is understood as keep_batchnorm_fp32 (NVIDIA's order) and what "
                "follows accordingly; pass these by name",
            )
            args = (*args[:_AMBIGUOUS], None, *args[_AMBIGUOUS:])
        elif (
            len(args) > _AMBIGUOUS + 1 and args[_AMBIGUOUS] is None and isinstance(args[_AMBIGUOUS + 1], bool)
        ):
            warn(
                f"amp.initialize: its eighth positional argument, {args[_AMBIGUOUS + 1]}, is taken as "
                f"{names[_AMBIGUOUS + 1]} (ROCm's order); in NVIDIA's it is {names[_AMBIGUOUS + 2]}; "
                "pass it by name",
            )
        return function(*args, **kwargs)

    return initialize


def _is_nvidia_order(args):
    """Whether the arguments from the seventh on are keep_batchnorm_fp32, master_weights, loss_scale, ..."""
    first, rest = args[_AMBIGUOUS], args[_AMBIGUOUS + 1 :]
    if isinstance(first, (bool, str)):
        return True
    if first is not None:
        return False
    # None may be either: look at what only one of the orders could have in the places that follow.
    third = rest[1] if len(rest) > 1 else None  # master_weights here, NVIDIA's loss_scale
    fourth = rest[2] if len(rest) > 2 else None  # loss_scale here, NVIDIA's cast_model_outputs
    fifth = rest[3] if len(rest) > 3 else None  # cast_model_outputs here, NVIDIA's num_losses
    is_number = isinstance(third, (int, float, str)) and not isinstance(third, bool)
    return is_number or isinstance(fourth, torch.dtype) or isinstance(fifth, int)
