"""CPU levels, the caller's threads, and what an exception of the C++ library becomes."""

import ctypes
import os
import threading
from ctypes import CFUNCTYPE, c_int64, c_void_p

import pytest

from . import build
from .apex_library import MEMORY, OK, Apex

Body = CFUNCTYPE(None, c_void_p, c_int64, c_int64)
ParallelFor = CFUNCTYPE(None, c_int64, c_int64, c_int64, Body, c_void_p)


@pytest.fixture(scope="module")
def check():
    """libapex with a few more exports (host_check.cpp)."""
    library = ctypes.CDLL(str(build.check_library()))
    library.check_parallel_sum.restype = c_int64
    library.check_parallel_sum.argtypes = [c_int64, c_int64, c_int64, ctypes.POINTER(c_int64)]
    library.apex_last_error.restype = ctypes.c_char_p
    library.apex_set_parallel_for.argtypes = [ParallelFor]
    return library


def parallel_sum(check, begin, end, grain=1):
    pieces = c_int64()
    return check.check_parallel_sum(begin, end, grain, ctypes.byref(pieces)), pieces.value


def flags_level():
    """The level that /proc/cpuinfo's flags give, by the psABI's list."""
    with open("/proc/cpuinfo") as file:
        flags = next(set(line.split(":")[1].split()) for line in file if line.startswith("flags"))
    level = 1
    for number, needed in (
        (2, "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3"),
        (3, "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"),
        (4, "avx512f avx512bw avx512cd avx512dq avx512vl"),
    ):
        if level == number - 1 and set(needed.split()) <= flags:
            level = number
    return level


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="levels are of x86-64")
def test_level_is_the_machines(check):
    """The kernel's list of flags (it leaves out what it does not save) agrees with ours."""
    assert check.check_machine_level() == check.apex_cpu_level() == flags_level()


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="levels are of x86-64")
def test_level_can_only_be_lowered(library):
    """Clamped to the machine's; 0 and negative give that back."""
    apex = Apex(library)
    most = apex.c.apex_set_cpu_level(0)
    assert most == flags_level()
    assert [apex.c.apex_set_cpu_level(level) for level in range(1, most + 1)] == list(range(1, most + 1))
    assert apex.c.apex_set_cpu_level(1) == apex.c.apex_cpu_level() == 1
    assert apex.c.apex_set_cpu_level(99) == most
    assert apex.c.apex_set_cpu_level(-1) == apex.c.apex_cpu_level() == most


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tiles_are_converted_as_one_element_is(check, dtype):
    """Bit for bit at every level of this machine, whatever the length; nothing beside the tile is touched."""
    check.check_tile_conversions.restype = c_int64
    for level in range(1, check.check_machine_level() + 1):
        assert check.check_tile_conversions(level, {"float16": 1, "bfloat16": 2}[dtype]) == 0, level


def test_parallel_for_runs_inline_without_a_callback(check):
    """One piece; nothing for an empty range."""
    assert parallel_sum(check, 0, 1000) == (499500, 1)
    assert parallel_sum(check, 5, 5) == (0, 0)
    assert parallel_sum(check, 5, 2) == (0, 0)


def test_parallel_for_uses_the_callers_threads(check):
    """The callback decides about pieces and threads; ranges within one grain do not reach it."""
    asked, threads = [], set()

    def parallel_for(begin, end, grain, body, context):
        asked.append((begin, end, grain))

        def piece(first):
            threads.add(threading.get_ident())
            body(context, first, min(first + 300, end))

        for first in range(begin, end, 300):
            worker = threading.Thread(target=piece, args=(first,))
            worker.start()
            worker.join()

    callback = ParallelFor(parallel_for)
    check.apex_set_parallel_for(callback)
    try:
        assert parallel_sum(check, 0, 1000, 10) == (499500, 4)
        assert parallel_sum(check, 0, 1000, 0) == (499500, 4)
        assert asked == [(0, 1000, 10), (0, 1000, 1)]
        assert threading.get_ident() not in threads
        assert parallel_sum(check, 0, 1000, 1000) == (499500, 1)
        assert len(asked) == 2
    finally:
        check.apex_set_parallel_for(ParallelFor())
    assert parallel_sum(check, 0, 1000) == (499500, 1)


def test_exceptions_become_statuses(check):
    """Nothing is thrown through the C interface."""
    assert check.check_guarded(0) == OK
    assert check.check_guarded(1) == MEMORY and check.apex_last_error() == b"out of host memory"
    assert check.check_guarded(2) == MEMORY and b"why" in check.apex_last_error()
    assert check.check_guarded(3) == MEMORY
