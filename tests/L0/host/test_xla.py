"""What the library asks of XLA, and how what XLA refuses is said. XLA is played by Python: no JAX, no card."""

from __future__ import annotations

import ctypes

import pytest

from apex._loader import library

from . import build

P, N, I32 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32
FUNCTIONS = 18
ERROR_CREATE, ERROR_MESSAGE, STREAM, ALLOCATE, FREE, DEVICE = 0, 1, 4, 9, 10, 17
INTERNAL = 13  # of absl::StatusCode
LARGEST_ALIGNMENT = 16  # kMaxAlignment of XLA's xla/ffi/ffi_api.cc


class Extended(ctypes.Structure):
    _fields_ = [("size", N), ("extensions", P)]


class Created(Extended):
    _fields_ = [("message", ctypes.c_char_p), ("code", I32)]


class Message(Extended):
    _fields_ = [("error", P), ("message", ctypes.c_char_p)]


class Allocated(Extended):
    _fields_ = [("context", P), ("bytes", N), ("alignment", N), ("memory", P)]


class Freed(Extended):
    _fields_ = [("context", P), ("bytes", N), ("memory", P)]


class Api(Extended):
    _fields_ = [("version", ctypes.c_byte * 24), ("internal", P), ("functions", P * FUNCTIONS)]


class Frame(Extended):
    _fields_ = [("api", ctypes.POINTER(Api)), ("context", P), ("stage", I32), ("lists", ctypes.c_byte * 144)]


class Xla:
    """Allows all but the functions of `refused`. created: the messages and codes of errors that handlers made;
    lent: what of its memory is not given back yet, address -> bytes."""

    def __init__(self, *refused: int):
        self.refused, self.created, self.lent, self.next = refused, [], {}, 0x1010

        def create(arguments):
            self.created.append((arguments.contents.message.decode(), arguments.contents.code))
            return 1

        def say(arguments):
            arguments.contents.message = b"the moon is full"

        def allocate(arguments):
            wanted = arguments.contents
            if ALLOCATE in refused or wanted.alignment > LARGEST_ALIGNMENT:
                return 2
            self.lent[self.next] = wanted.bytes
            wanted.memory, self.next = self.next, self.next + 0x1010
            return None

        def free(arguments):
            assert self.lent.pop(arguments.contents.memory) == arguments.contents.bytes

        answers = [ctypes.CFUNCTYPE(P, P)(lambda _, error=error: error) for error in (None, 2)]
        functions = [answers[i in refused] for i in range(FUNCTIONS)]
        functions[ERROR_CREATE] = ctypes.CFUNCTYPE(P, ctypes.POINTER(Created))(create)
        functions[ERROR_MESSAGE] = ctypes.CFUNCTYPE(None, ctypes.POINTER(Message))(say)
        functions[ALLOCATE] = ctypes.CFUNCTYPE(P, ctypes.POINTER(Allocated))(allocate)
        functions[FREE] = ctypes.CFUNCTYPE(None, ctypes.POINTER(Freed))(free)
        self.functions = functions  # alive as long as this is
        self.api = Api(size=ctypes.sizeof(Api))
        self.api.functions[:] = [ctypes.cast(function, P).value for function in functions]

    def call(self, handler):
        """Whether the handler made no error."""
        handler.restype, handler.argtypes = P, [ctypes.POINTER(Frame)]
        return handler(Frame(size=ctypes.sizeof(Frame), api=ctypes.pointer(self.api))) is None


@pytest.mark.parametrize("refused", [STREAM, DEVICE], ids=["stream", "device"])
def test_xla_is_quoted(refused):
    xla = Xla(refused)
    assert not xla.call(library.load().c.apex_xla_rms_norm_backward_cuda)
    (message, _), *more = xla.created
    assert not more and "the moon is full" in message and "rms_norm_backward" in message


@pytest.mark.parametrize("platform", ["cpu", "cuda", "hip"])
def test_scratch_memory_is_taken_and_given_back(platform):
    xla = Xla()
    assert xla.call(getattr(ctypes.CDLL(str(build.check_library())), f"apex_xla_check_scratch_{platform}")), (
        xla.created
    )
    assert xla.lent == {} and (xla.next > 0x1010) == (platform != "cpu")


def test_memory_that_xla_refuses_is_said():
    xla = Xla(ALLOCATE)
    assert not xla.call(ctypes.CDLL(str(build.check_library())).apex_xla_check_scratch_cuda)
    assert xla.created == [
        (
            "check_scratch: no memory for what it keeps aside. XLA refused the stream, the device or memory: "
            "the moon is full",
            INTERNAL,
        )
    ]
