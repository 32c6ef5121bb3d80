"""Calling functional ops of the dispatcher (pairs x_forward / x_backward) from Python.

In eager mode a call goes straight into C++ (pybind11, then torch's dispatcher: autograd, autocast and dispatch
modes work as ever). Where something looks at Python itself, torch.compile or a tensor type with
__torch_function__, it goes through torch.ops, which those understand.
"""

from __future__ import annotations

import torch

from apex._loader import bindings, library

# Before anything is traced: loading inside torch.compile would break the graph. Opens no GPU driver.
_module = bindings.load().module


def entry(name):
    """The direct entry of that name, or None where no bindings are loaded.

    For functions that are called so often that `call`'s own microsecond shows: they look it up once and do by
    themselves what `call` does.
    """
    return getattr(_module, name, None)


def call(name, forward, outputs, arguments):
    """The first `outputs` results of the op `forward` (None: all); one alone if `outputs` is 1.

    name: of the direct entry in the bindings' module. forward: the op, as torch.ops.apex.<op>.default.
    """
    if torch.compiler.is_compiling() or _module is None or torch.overrides.has_torch_function(arguments):
        found = forward(*arguments)
        if isinstance(found, torch.Tensor):
            return found
        return found[0] if outputs == 1 else found[:outputs]
    try:
        return getattr(_module, name)(*arguments)
    except RuntimeError:
        library.raise_stored()  # the probe's own exception, if it refused to choose
        raise
