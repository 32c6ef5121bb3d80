"""What XLA refuses a call of the library is said with XLA's own words. XLA is played by Python: no JAX, no card."""

from __future__ import annotations

import ctypes

import pytest

from apex._loader import library

P, N, I32 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32
FUNCTIONS = 18


class Extended(ctypes.Structure):
    _fields_ = [("size", N), ("extensions", P)]


class Created(Extended):
    _fields_ = [("message", ctypes.c_char_p), ("code", I32)]


class Message(Extended):
    _fields_ = [("error", P), ("message", ctypes.c_char_p)]


class Api(Extended):
    _fields_ = [("version", ctypes.c_byte * 24), ("internal", P), ("functions", P * FUNCTIONS)]


class Frame(Extended):
    _fields_ = [("api", ctypes.POINTER(Api)), ("context", P), ("stage", I32), ("lists", ctypes.c_byte * 144)]


@pytest.mark.parametrize("refused", [4, 17], ids=["stream", "device"])
def test_xla_is_quoted(refused):
    created = []

    def create(arguments):
        created.append(arguments.contents.message.decode())
        return 1

    def say(arguments):
        arguments.contents.message = b"the moon is full"

    made = ctypes.CFUNCTYPE(P, ctypes.POINTER(Created))(create)
    said = ctypes.CFUNCTYPE(None, ctypes.POINTER(Message))(say)
    answers = [ctypes.CFUNCTYPE(P, P)(lambda _, error=error: error) for error in (None, 2)]
    functions = [answers[i == refused] for i in range(FUNCTIONS)]
    functions[0], functions[1] = made, said
    api = Api(size=ctypes.sizeof(Api))
    api.functions[:] = [ctypes.cast(function, P).value for function in functions]
    frame = Frame(size=ctypes.sizeof(Frame), api=ctypes.pointer(api))
    handler = library.load().c.apex_xla_rms_norm_backward_cuda
    handler.restype, handler.argtypes = P, [ctypes.POINTER(Frame)]
    assert handler(frame) == 1
    assert len(created) == 1 and "the moon is full" in created[0] and "rms_norm_backward" in created[0]
