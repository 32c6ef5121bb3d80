"""What public apex's raw functions are, which no autograd and no autocast reaches."""

from __future__ import annotations

import functools

import torch

from apex._once import runs_in_given_dtypes


def raw(function):
    """The function without gradients, and in the dtypes that it is given."""
    plain = runs_in_given_dtypes(function)
    traced = torch.no_grad()(plain)

    @functools.wraps(function)
    def run(*arguments, **keywords):
        if not torch.is_grad_enabled():
            return plain(*arguments, **keywords)
        if torch.compiler.is_compiling():
            return traced(*arguments, **keywords)
        torch._C._set_grad_enabled(False)  # what torch.no_grad does, in a tenth of its time
        try:
            return plain(*arguments, **keywords)
        finally:
            torch._C._set_grad_enabled(True)

    run.is_raw = True
    return run


def is_raw(function):
    """Whether it was made by `raw`."""
    return getattr(function, "is_raw", False)
