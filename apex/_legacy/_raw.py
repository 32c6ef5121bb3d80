"""What public apex's raw functions are, which no autograd and no autocast reaches."""

from __future__ import annotations

import functools

import torch

from apex._once import in_given_dtypes


def _device_type(arguments):
    """The kind of device of the first tensor among the arguments, or in a list among them."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            return argument.device.type
        if isinstance(argument, (list, tuple)) and argument:
            return _device_type(argument)
    return "cpu"


def raw(function):
    """The function without gradients, and in the dtypes that it is given."""

    @functools.wraps(function)
    def run(*arguments, **keywords):
        with torch.no_grad(), in_given_dtypes(_device_type((*arguments, *keywords.values()))):
            return function(*arguments, **keywords)

    return run
