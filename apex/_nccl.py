"""NCCL (RCCL), opened beside torch's own: communicators, sends and receives. Nothing is linked to it."""

from __future__ import annotations

import contextlib
import ctypes
import functools

import torch

from apex._loader import vendor
from apex._loader.errors import ArgumentError, ArgumentTypeError, DriverError, NoDriverError

ID_BYTES = 128
INSTEAD = "use torch.distributed.batch_isend_irecv, as HaloExchangerSendRecv of apex.contrib.bottleneck does"
# ncclDataType_t
TYPES = {
    torch.int8: 0, torch.uint8: 1, torch.bool: 1, torch.int32: 2, torch.int64: 4, torch.float16: 6, torch.float32: 7,
    torch.float64: 8, torch.bfloat16: 9,
}  # fmt: skip


class _Id(ctypes.Structure):
    """ncclUniqueId, which NCCL takes by value."""

    _fields_ = [("bytes", ctypes.c_char * ID_BYTES)]


_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_SIGNATURES = {
    "ncclGetUniqueId": [_POINTER],
    "ncclCommInitRank": [_POINTER, _INT, _Id, _INT],
    "ncclCommDestroy": [_POINTER],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclSend": [_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "ncclRecv": [_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
}


@functools.cache
def _library():
    """The functions by name. Raises NoDriverError."""
    reasons = []
    for stem in ("libnccl.so", "librccl.so"):
        found = vendor.find(stem)
        reasons.append(found.reason)
        if found.path:
            break
    else:
        raise NoDriverError("there is no NCCL to use", found="; ".join(reasons), remedy=INSTEAD)
    try:
        library = vendor.open_library(found)
        functions = {name: getattr(library, name) for name in _SIGNATURES}
        words = library.ncclGetErrorString
    except (OSError, AttributeError) as error:
        raise NoDriverError(f"NCCL cannot be used: {error}", found=found.path, remedy=INSTEAD) from error
    words.restype, words.argtypes = ctypes.c_char_p, [_INT]
    for name, arguments in _SIGNATURES.items():
        functions[name].restype, functions[name].argtypes = _INT, arguments
    return functions, words


def call(name, *arguments):
    """A function of NCCL. Raises DriverError with NCCL's words if it fails."""
    functions, words = _library()
    code = functions[name](*arguments)
    if code:
        raise DriverError(f"{name}: {words(code).decode()} ({code})", remedy="NCCL_DEBUG=INFO says more")


def unique_id():
    """The 128 bytes by which ranks meet."""
    made = ctypes.create_string_buffer(ID_BYTES)
    call("ncclGetUniqueId", made)
    return made.raw


class Communicator:
    """Ranks that send to each other, on the current GPU of each. Made by all ranks together."""

    def __init__(self, unique_id, rank, ranks):
        made = ctypes.c_void_p()
        call("ncclCommInitRank", ctypes.byref(made), ranks, _Id.from_buffer_copy(unique_id), rank)
        self.pointer, self.ranks = made.value, ranks

    @contextlib.contextmanager
    def group(self):
        """Sends and receives within begin together at its end."""
        call("ncclGroupStart")
        try:
            yield
        finally:
            call("ncclGroupEnd")

    def send(self, tensor, rank):
        """Of a contiguous tensor, on torch's current stream."""
        self._queue("ncclSend", tensor, rank)

    def receive(self, tensor, rank):
        """Into a contiguous tensor, likewise."""
        self._queue("ncclRecv", tensor, rank)

    def _queue(self, name, tensor, rank):
        if not 0 <= rank < self.ranks:
            raise ArgumentError(f"there is no rank {rank} among {self.ranks}")
        if tensor.dtype not in TYPES:
            raise ArgumentTypeError(f"NCCL does not send {tensor.dtype}")
        stream = torch.cuda.current_stream(tensor.device).cuda_stream
        call(name, tensor.data_ptr(), tensor.numel(), TYPES[tensor.dtype], rank, self.pointer, stream)

    def destroy(self):
        """Ends it; all that was queued must be done."""
        if self.pointer:
            pointer, self.pointer = self.pointer, None
            call("ncclCommDestroy", pointer)
