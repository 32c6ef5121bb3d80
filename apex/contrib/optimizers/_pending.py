"""Parameters that wait for their values: whoever uses one gets them first."""

from __future__ import annotations

import functools

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

_finish = WeakTensorKeyDictionary()  # parameter that waits -> what brings its values


class PendingParameter(torch.nn.Parameter):
    """A parameter whose values are still under way.

    A parameter becomes one by a change of its class, and is what it was again as soon as any function of torch,
    attribute or method of it is used. `await_values` made it one.
    """

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, PendingParameter):
                _arrive(tensor)
        return function(*args, **kwargs)


def can_wait(p):
    """Whether a parameter can become one that waits: subclasses with a life of their own cannot."""
    return type(p) is torch.nn.Parameter


def await_values(p, finish):
    """From here on whoever uses `p` calls finish() first, once."""
    _finish[p] = finish
    p.__class__ = PendingParameter


def arrived(p):
    """The values of `p` are there."""
    if type(p) is PendingParameter:
        p.__class__ = torch.nn.Parameter
        _finish.pop(p, None)


def _arrive(p):
    finish = _finish.get(p)
    arrived(p)
    if finish is not None:
        finish()


def untouched(method):
    """A method that handles parameters without their values: none is waited for on its behalf."""

    @functools.wraps(method)
    def call(*args, **kwargs):
        with torch._C.DisableTorchFunctionSubclass():
            return method(*args, **kwargs)

    return call
