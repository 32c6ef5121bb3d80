"""Calling functional ops of the dispatcher (pairs x_forward / x_backward) from Python.

In eager mode a call goes straight into C++ (pybind11, then torch's dispatcher: autograd, autocast and dispatch
modes work as ever). Where something looks at Python itself, torch.compile or a tensor type with
__torch_function__, it goes through torch.ops, which those understand. ONNX exporters know torch's own ops alone:
they are shown what an op is in plain PyTorch, its reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.compiler import is_compiling
from torch.fx import Proxy
from torch.overrides import has_torch_function

from apex._loader import bindings, library
from apex._loader import reference as references

# Before anything is traced: loading inside torch.compile would break the graph. Opens no GPU driver.
_module = bindings.load().module


_tracing_state = torch._C._get_tracing_state


def is_traced():
    """Whether torch.compile, torch.export, torch.jit.trace or torch.onnx.export looks at the Python code that runs."""
    return is_compiling() or _tracing_state() is not None


def entry(name):
    """The direct entry of that name, or None where no bindings are loaded.

    For functions that are called so often that `call`'s own microsecond shows: they look it up once and do by
    themselves what `call` does.
    """
    return getattr(_module, name, None)


class Function:
    """Has the face of an autograd.Function, `apply` and `forward`, as public apex exports it.

    The op behind `forward` is differentiable by itself. Not a subclass: torch.compile would trace a backward that is
    not there.
    """

    forward: ClassVar[Callable[..., Any]]

    @classmethod
    def apply(cls, *arguments: Any) -> Any:
        return cls.forward(None, *arguments)


def call(name, forward, outputs, arguments):
    """The first `outputs` results of the op `forward` (None: all); one alone if `outputs` is 1; None of an op that has
    none.

    name: of the direct entry in the bindings' module. forward: the op, as torch.ops.apex.<op>.default.
    """
    # As is_traced asks, but without its frame: every op of every step comes by.
    if is_compiling() or _tracing_state() is not None or _module is None or has_torch_function(arguments):
        found = dispatch(forward, arguments)
        if found is None or isinstance(found, torch.Tensor):
            return found
        # torch.fx does not know what a proxy is of.
        if isinstance(found, Proxy) and len(forward._schema.returns) == 1:
            return found
        return found[0] if outputs == 1 else found[:outputs]
    try:
        found = getattr(_module, name, None) or bindings.entry(_module, name)  # which raises
        return found(*arguments)
    except RuntimeError as error:
        library.raise_stored(error)  # the probe's own exception, if it refused to choose
        raise


def dispatch(op, arguments):
    """All results of an op, as what looks at Python (see `is_traced`) understands it."""
    if is_traced() and torch.onnx.is_in_onnx_export():
        return _plain(op, arguments)
    return op(*arguments)


def _plain(op, arguments):
    """The same by the op's reference, with the op's rule for autocast."""
    name = op._schema.name.rpartition("::")[2]
    module = references.module(name)
    reference, device_type = getattr(module, name), arguments[0].device.type
    if is_autocast_enabled(device_type):
        for pair in getattr(module, "PAIRS", ()):
            if f"{pair.name}_forward" == name:
                return reference(**pair.autocast(device_type, arguments, {}))
    return reference(*arguments)


def is_autocast_enabled(device_type):
    """torch.is_autocast_enabled, which raises for kinds of device without autocast: meta, for one.

    Traced code runs on devices that have autocast; before 2.12 torch.compile cannot trace the question.
    """
    has_autocast = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device_type)
    return device_type != "meta" and has_autocast and torch.is_autocast_enabled(device_type)
