"""A device "npu" in Python: what torch_npu is to a program, without hardware.

Its tensors have memory of their own kind (PrivateUse1), which really is the CPU's; every operator of torch runs on
the CPU behind. Importing this once makes the device; it cannot be taken back, so do that in a process of its own.
"""

from __future__ import annotations

import ctypes

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils.dlpack import from_dlpack, to_dlpack

_CPU, _PRIVATE = 1, 12  # kDLCPU, kDLExtDev of dlpack.h
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _relabelled(tensor, kind):
    """The same memory, as a tensor of another kind of device."""
    capsule = to_dlpack(tensor.detach())
    device = ctypes.c_int32.from_address(_pointer(capsule, b"dltensor") + 8)  # behind the data's address
    device.value = kind
    return from_dlpack(capsule)


def to_npu(tensor):
    """The CPU tensor's memory as a tensor on npu:0."""
    return _relabelled(tensor, _PRIVATE)


def to_cpu(tensor):
    """The other way round."""
    return _relabelled(tensor, _CPU)


def _fallback(op, *arguments, **keywords):
    """Runs an operator on the CPU's view of its tensors; what it returns anew goes back to the npu."""
    owners = {}  # id of an alias on the CPU -> (the npu tensor whose alias it is, the alias)

    def inwards(value):
        if isinstance(value, torch.device) and value.type == "npu":
            return torch.device("cpu")
        if not (isinstance(value, torch.Tensor) and value.device.type == "npu"):
            return value
        alias = to_cpu(value)
        owners[id(alias)] = value, alias
        return alias

    def outwards(value):
        if not isinstance(value, torch.Tensor):
            return value
        return owners[id(value)][0] if id(value) in owners else to_npu(value)

    empty = {name for name, t in keywords.items() if isinstance(t, torch.Tensor) and not t.numel()}  # out=
    resized = {name: torch.empty(0, dtype=keywords[name].dtype) for name in empty}
    arguments = [  # numbers that became tensors come here as numbers again
        torch.tensor(value) if isinstance(value, (int, float)) and str(wanted.type) == "Tensor" else value
        for value, wanted in zip(arguments, op._schema.arguments, strict=False)
    ]
    inside = tree_map(inwards, (arguments, keywords))
    if op.name().startswith("aten::_copy_from"):  # what copy_ becomes between two kinds of device
        return tree_map(outwards, inside[0][1].copy_(inside[0][0]))
    found = op(*inside[0], **(inside[1] | resized))
    for name, tensor in resized.items():
        keywords[name].data = to_npu(tensor)
        owners[id(tensor)] = keywords[name], tensor
    return tree_map(outwards, found)


_setup_privateuseone_for_python_backend("npu")
_library = torch.library.Library("_", "IMPL")
_library.fallback(_fallback, "PrivateUse1")


class _Stream:
    """The one stream of the device: everything is done when it is called."""

    def wait_stream(self, other):
        pass


class _Event:
    """Has always come."""

    def record(self, stream=None):
        pass

    def query(self):
        return True

    def synchronize(self):
        pass


_stream = _Stream()
torch.npu.Event = _Event
torch.npu.current_stream = lambda device=None: _stream
