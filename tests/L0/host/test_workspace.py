"""Memory that a call takes from its caller: what is asked for, what is answered where there is none, and counters that
a graph must zero itself."""

import ctypes
from ctypes import CFUNCTYPE, POINTER, byref, c_int32, c_int64, c_uint64, c_void_p

import pytest

from . import build
from .apex_library import ARGUMENT, CPU, OK, Place
from .test_memory import IN_CAPTURES, on_both, words

WORKSPACE = 11  # APEX_ERROR_WORKSPACE
Take = CFUNCTYPE(c_void_p, c_void_p, c_uint64)


class Workspace(ctypes.Structure):
    """apex_workspace: what was asked for; `room` is what it hands out, one block for each call."""

    _fields_ = [("take", Take), ("context", c_void_p)]

    def __init__(self, room=1 << 20, offset=0):
        self.asked, self.blocks = [], []

        def take(context, size):
            self.asked.append(size)
            if size > room:
                return None
            block = ctypes.create_string_buffer(b"\xff" * (size + 64), size + 64)
            self.blocks.append(block)
            return (ctypes.addressof(block) + 15) // 16 * 16 + offset

        super().__init__(Take(take), None)


def library():
    found = ctypes.CDLL(str(build.check_library()))
    found.apex_last_error.restype = ctypes.c_char_p
    found.check_take_workspace.argtypes = [
        POINTER(Place), POINTER(Workspace), c_int64, c_int64, POINTER(c_void_p), POINTER(c_void_p),
    ]  # fmt: skip
    return found


@pytest.fixture(scope="module")
def check():
    return library()


def take(check, place, workspace, size, count=0):
    """(status, memory, counters)"""
    memory, counters = c_void_p(), c_void_p()
    lent = byref(workspace) if workspace else None
    status = check.check_take_workspace(byref(place), lent, size, count, byref(memory), byref(counters))
    return status, memory.value, counters.value


def test_nothing_is_asked_for_that_is_not_needed(check):
    workspace = Workspace()
    assert take(check, Place(CPU, 0, None), workspace, 0) == (OK, None, None) and workspace.asked == []
    assert take(check, Place(CPU, 0, None), None, 0)[0] == OK
    status, memory, _ = take(check, Place(CPU, 0, None), workspace, 100)
    assert status == OK and memory % 16 == 0 and workspace.asked == [100]


def test_what_cannot_be_used_is_said(check):
    place = Place(CPU, 0, None)
    assert take(check, place, None, 8)[0] == ARGUMENT and b"workspace is wanted" in check.apex_last_error()
    assert take(check, place, Workspace(room=4), 8)[0] == WORKSPACE and b"8 bytes" in check.apex_last_error()
    assert take(check, place, Workspace(offset=8), 8)[0] == ARGUMENT and b"aligned" in check.apex_last_error()


@on_both
def test_counters_are_the_librarys_while_it_has_some(apex, driver, platform):
    check, stream, workspace = library(), driver.c.fake_stream(0), Workspace()
    driver.c.fake_begin_capture(stream)
    status, memory, counters = take(check, Place(platform, 0, stream), workspace, 40, 7)
    assert status == OK and workspace.asked == [40] and words(counters, 7) == [0] * 7
    assert not memory <= counters < memory + 64


@on_both
def test_a_graph_zeroes_counters_that_the_library_has_not(apex, driver, platform):
    """They lie behind the rest of the workspace, in one block, zeroed by the graph that is captured."""
    check, stream, workspace = library(), driver.c.fake_stream(0), Workspace()
    driver.c.fake_begin_capture(stream)
    driver.log()
    count = IN_CAPTURES + 1
    status, memory, counters = take(check, Place(platform, 0, stream), workspace, 40, count)
    assert status == OK and workspace.asked == [48 + 4 * count] and counters == memory + 48
    assert f"memset {4 * count}, captured" in driver.log()  # alone, and not before the graph runs
    assert words(memory, 12 + count) == [0xFFFFFFFF] * (12 + count)
    status, *_ = take(check, Place(platform, 0, stream), Workspace(room=0), 40, count)
    assert status == WORKSPACE


def test_an_op_asks_for_what_its_sums_take():
    """One call of a direction, and one request: layer norm's backward of 64 rows on the CPU has four parts of two sums,
    each as long as a row."""
    c = ctypes.CDLL(str(build.build_library()))
    rows, hidden = 64, 6
    floats = (ctypes.c_float * (rows * hidden))(*([1.0] * rows * hidden))
    made, sums = (ctypes.c_float * (rows * hidden))(), [(ctypes.c_float * hidden)() for _ in range(2)]

    class NormBackward(ctypes.Structure):
        _fields_ = [
            *((name, c_void_p) for name in ("grad_output", "saved", "grad_sum", "mean", "rstd", "weight", "bias")),
            *((name, c_void_p) for name in ("grad_input", "grad_weight", "grad_bias", "partials")),
            ("rows", c_int64), ("hidden", c_int64), ("eps", ctypes.c_double),
            ("rest", c_int32 * 64),
        ]  # fmt: skip

    at = ctypes.addressof
    a = NormBackward(at(floats), at(floats), None, at(floats), at(floats), at(floats), at(floats), at(made))
    a.grad_weight, a.grad_bias, a.rows, a.hidden, a.eps = at(sums[0]), at(sums[1]), rows, hidden, 1e-5
    workspace = Workspace()
    assert c.apex_layer_norm_backward(byref(Place(CPU, 0, None)), byref(a), byref(workspace)) == OK
    assert workspace.asked == [2 * 4 * 8 * 4]  # a row of six floats is padded to eight
    assert list(sums[1]) == [64.0] * hidden
    assert (
        c.apex_layer_norm_backward(byref(Place(CPU, 0, None)), byref(a), byref(Workspace(room=0)))
        == WORKSPACE
    )
