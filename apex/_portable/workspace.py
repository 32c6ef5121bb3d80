"""Memory that libapex asks for during a call: csrc/bindings/workspace.h in Python."""

from __future__ import annotations

import ctypes
import threading

import torch

from apex._portable import interface
from apex._portable.tensors import must_use_reference


class _Call(threading.local):
    """Of the thread that calls: the device on which memory is wanted, what was taken, what that raised."""

    device = taken = failure = None


_call = _Call()


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)
def _take(context, size):
    try:
        memory = torch.empty(size, dtype=torch.uint8, device=_call.device)
    except BaseException as error:  # which cannot pass through C
        _call.failure = error
        return None
    _call.taken.append(memory)
    return memory.data_ptr()


_lent = interface.layout("apex_workspace").packer("take", "context")(
    ctypes.cast(_take, ctypes.c_void_p).value, 0
)


def status_of(function, device, *arguments):
    """What a function of libapex that takes a workspace last answers. Raises what an allocation raised."""
    before = _call.device, _call.taken, _call.failure
    _call.device, _call.taken, _call.failure = device, [], None
    try:
        status = function(*arguments, _lent)
        if _call.failure is not None:
            raise _call.failure
        return status
    finally:
        _call.device, _call.taken, _call.failure = before


def run(function, place, packed, op, like):
    """Likewise, of a struct beside the tensor `like`. False: the reference must run; raises what libapex says of the
    arguments."""
    status = status_of(function, like.device, place, packed)
    return not (status and must_use_reference(status, op))
