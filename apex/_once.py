"""Backwards of autograd functions in Python: what autocast around them must not change, and what has no derivative."""

from __future__ import annotations

import contextlib
import functools

import torch

from apex._functional import is_autocast_enabled
from apex._loader import reference

_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def in_given_dtypes(device_type):
    """A context: while it lasts, neither autocast nor amp's O1 casts what torch's products take.

    A backward may be called under an autocast that its forward was not under.
    """
    if torch.compiler.is_compiling():
        return _without_autocast(device_type)
    return _given(device_type) if _any_autocast() else reference.PlainTorch()


def _without_autocast(device_type):
    if is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


@contextlib.contextmanager
def _given(device_type):
    with _without_autocast(device_type), reference.PlainTorch():
        yield


def _device_type(arguments):
    """The kind of device of the first tensor among the arguments, or in a list among them."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            return argument.device.type
        if isinstance(argument, (list, tuple)) and argument:
            return _device_type(argument)
    return "cpu"


def runs_in_given_dtypes(function):
    """Decorates a function of tensors: in_given_dtypes on their device while it runs."""

    @functools.wraps(function)
    def run(*arguments, **keywords):
        if not torch.compiler.is_compiling() and not _any_autocast():
            with reference.PlainTorch():
                return function(*arguments, **keywords)
        with in_given_dtypes(_device_type((*arguments, *keywords.values()))):
            return function(*arguments, **keywords)

    return run


class _Refusal(torch.autograd.Function):
    """apply(name, count, *tensors): the first `count` tensors, of which no gradient passes to the others."""

    @staticmethod
    def forward(ctx, name, count, *tensors):
        ctx.name = name
        return tuple(tensor.clone() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(f"{ctx.name} is once_differentiable: its gradient has no derivative")


def differentiable_once(name):
    """Decorates backward(ctx, saved, *grads), saved being ctx.saved_tensors; the gradients' own gradient is refused.

    torch's once_differentiable refuses it only where one of `grads` has a history, as that of a sum has not: the second
    derivative would be missing without a word.
    """

    def decorate(backward):
        @functools.wraps(backward)
        def run(ctx, *grads):
            saved = ctx.saved_tensors  # once: a checkpoint gives them no second time
            if not (torch.compiler.is_compiling() or torch.is_grad_enabled() or _any_autocast()):
                with reference.PlainTorch():
                    return backward(ctx, saved, *grads)
            known = [tensor for tensor in grads if tensor is not None]
            dtypes = in_given_dtypes(known[0].device.type) if known else contextlib.nullcontext()
            with torch.no_grad(), dtypes:
                found = backward(ctx, saved, *grads)
            if torch.compiler.is_compiling() or not torch.is_grad_enabled():
                return found
            owners = [tensor for tensor in (*saved, *known) if tensor is not None and tensor.requires_grad]
            made = [tensor for tensor in found if tensor is not None]
            refused = iter(_Refusal.apply(name, len(made), *made, *owners) if made else ())
            return tuple(None if tensor is None else next(refused) for tensor in found)

        return run

    return decorate
