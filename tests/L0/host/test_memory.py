"""Memory that outlives calls, on both vendors' fakes: zeroed, of one stream, none of a graph's."""

import ctypes
import os
import signal
import threading
import time

import pytest

from .apex_library import ARGUMENT, CPU, CUDA, DRIVER, FORKED, HIP, OK, Apex
from .fresh_process import fresh_process, on_both

MIB = 1 << 20
IN_CAPTURES = 65536  # counters that a device has for captured launches


def words(address, count):
    """`count` 32-bit words there."""
    return list((ctypes.c_uint32 * count).from_address(address))


def spoil(address, count):
    """As a kernel that was killed would leave them."""
    ctypes.memset(address, 0xFF, 4 * count)


def allocations(log):
    return [line for line in log if line.startswith("allocate")]


def settled(log):
    """The log without what entering a context or setting a device adds."""
    return [line for line in log if not line.startswith(("push", "pop", "set", "retain", "cuInit"))]


@on_both
def test_the_first_counters_are_made_zero_and_kept(apex, driver, platform):
    """One allocation, zeroed outside every stream of the caller's; then no call of the driver at all."""
    stream = driver.c.fake_stream(0)
    apex.is_capturing(platform, 0, stream)
    driver.log()
    status, first = apex.counters(platform, 0, stream, 100)
    assert status == OK, apex.last_error
    assert words(first, 4096) == [0] * 4096 and first % 512 == 0
    log = driver.log()
    assert len(allocations(log)) == 1 and log.count(f"memset {2 * MIB}") == 1
    assert [line for line in settled(log) if line.startswith("mode")] == ["mode 2", "mode 0"]
    assert apex.counters(platform, 0, stream, 4096) == (OK, first)
    assert settled(driver.log()) == []
    assert driver.c.fake_live() == 1


@on_both
def test_streams_and_devices_share_nothing(apex, driver, platform):
    """Each has its own; more than there are gives others, and the old ones go to no other stream."""
    one, other, second = driver.c.fake_stream(0), driver.c.fake_stream(0), driver.c.fake_stream(1)
    blocks = []
    for device, stream in ((0, None), (0, one), (0, other), (1, None), (1, second)):
        status, address = apex.counters(platform, device, stream, 4096)
        assert status == OK, apex.last_error
        blocks.append(address)
    status, larger = apex.counters(platform, 0, one, 5000)
    assert status == OK and words(larger, 8192) == [0] * 8192
    blocks += [larger, larger + 4 * 4096]
    for a in blocks:
        assert all(a == b or abs(a - b) >= 4 * 4096 for b in blocks)
    assert len(set(blocks)) == 7
    assert apex.counters(platform, 0, one, 1) == (OK, larger)
    devices = sorted(line.split()[-1] for line in allocations(driver.log()))
    assert devices == ["0", "1"]


@on_both
def test_counters_of_a_capture(apex, driver, platform):
    """The first of a process made in a capture: it survives, they are zero before any replay, and no launch shares."""
    stream = driver.c.fake_stream(1)
    driver.c.fake_set_capture_mode(1)
    driver.c.fake_begin_capture(stream)
    captured = [apex.counters(platform, 1, stream, count) for count in (1, 33, 1)]
    assert [status for status, _ in captured] == [OK] * 3, apex.last_error
    driver.c.fake_end_capture(stream)
    log = driver.log()
    assert not any("broke" in line or "captured" in line for line in log)
    assert len(allocations(log)) == 1 and driver.c.fake_capture_mode() == 1
    first, second, third = (address for _, address in captured)
    assert words(first, 128) == [0] * 128
    assert (second - first, third - second) == (128, 256)
    status, eager = apex.counters(platform, 1, stream, 4096)
    assert status == OK and not first <= eager < first + 4 * IN_CAPTURES
    assert words(eager, 4096) == [0] * 4096


@on_both
def test_another_thread_captures(apex, driver, platform):
    """A capture in the global mode forbids much to every thread; memory is made all the same."""
    driver.c.fake_begin_capture(driver.c.fake_stream(0))
    status, address = apex.counters(platform, 1, driver.c.fake_stream(1), 1)
    assert status == OK and words(address, 1) == [0], apex.last_error
    status, address = apex.take_memory(platform, 0, driver.c.fake_stream(0), 3 * MIB)
    assert status == OK and words(address, 4) == [0] * 4, apex.last_error
    assert not any("broke" in line for line in driver.log())
    assert driver.c.fake_capture_mode() == 0


@on_both
def test_captures_use_up_what_they_have(apex, driver, platform):
    """Then there is none, which is no failure: the graph zeroes memory of its own. Eager work is not touched."""
    stream = driver.c.fake_stream(0)
    driver.c.fake_begin_capture(stream)
    assert apex.counters(platform, 0, stream, IN_CAPTURES + 1) == (OK, None)
    assert apex.counters(platform, 0, stream, IN_CAPTURES - 1)[1]
    driver.log()
    for _ in range(1000):
        assert apex.counters(platform, 0, stream, 1) == (OK, None)
    assert allocations(driver.log()) == [] and driver.c.fake_live() == 1
    driver.c.fake_end_capture(stream)
    assert apex.counters(platform, 0, stream, 1)[1]


@on_both
def test_memory_is_none_of_a_graphs(apex, driver, platform):
    """A plan takes none while its stream captures, and the driver is not asked for any."""
    stream = driver.c.fake_stream(0)
    driver.c.fake_begin_capture(stream)
    assert apex.take_memory(platform, 0, stream, 1000) == (OK, None)
    driver.c.fake_end_capture(stream)
    assert driver.c.fake_live() == 0
    status, address = apex.take_memory(platform, 0, stream, 1000)
    assert status == OK and words(address, 256) == [0] * 256


@on_both
def test_given_back_is_for_the_same_stream(apex, driver, platform):
    """Nothing is freed; the stream's order says when the old work is over, so zeroing too waits its turn there."""
    one, other = driver.c.fake_stream(0), driver.c.fake_stream(0)
    _, block = apex.take_memory(platform, 0, one, 1000)
    spoil(block, 250)
    apex.give_memory_back(platform, 0, one, 1000, block)
    _, of_other = apex.take_memory(platform, 0, other, 1000)
    _, of_other_device = apex.take_memory(platform, 1, None, 1000)
    _, larger = apex.take_memory(platform, 0, one, 1025)
    assert len({block, of_other, of_other_device, larger}) == 4
    driver.log()
    assert apex.take_memory(platform, 0, one, 513) == (OK, block)  # 1024 bytes, as before
    assert settled(driver.log()) == ["memset 1024"]
    assert words(block, 250) == [0xFFFFFFFF] * 250  # the old work may still write there
    driver.c.fake_run(one)
    assert words(block, 250) == [0] * 250
    spoil(block, 250)
    apex.give_memory_back(platform, 0, one, 1000, block)
    assert apex.take_memory(platform, 0, one, 1000, zeroed=False) == (OK, block)
    assert settled(driver.log()) == [] and words(block, 1) == [0xFFFFFFFF]


@on_both
def test_plans_that_come_and_go_take_no_more(apex, driver, platform):
    """What is held is bounded by what was in use at once."""
    stream = driver.c.fake_stream(0)
    for round_ in range(300):
        taken = [(size, apex.take_memory(platform, 0, stream, size)[1]) for size in (10, 5000, MIB, 3 * MIB)]
        assert len({address for _, address in taken}) == 4
        for size, address in taken[:: -1 if round_ % 2 else 1]:
            apex.give_memory_back(platform, 0, stream, size, address)
    assert driver.c.fake_live() <= 3 and len(allocations(driver.log())) <= 3


@on_both
def test_a_full_device_has_none(apex, driver, platform):
    """No failure, no error left with the driver: the caller takes its own. Later there is memory again."""
    driver.c.fake_set_room(MIB)
    assert apex.counters(platform, 0) == (OK, None)
    assert apex.take_memory(platform, 0) == (OK, None)
    if platform == HIP:
        assert driver.c.fake_last_error() == 0
    driver.c.fake_set_room(1 << 30)
    assert apex.counters(platform, 0)[1] and apex.take_memory(platform, 0)[1]


CALLS = {
    CUDA: ("cuMemAlloc", "cuStreamCreate", "cuMemsetD8Async", "cuStreamSynchronize"),
    HIP: ("hipMalloc", "hipStreamCreateWithFlags", "hipMemsetAsync", "hipStreamSynchronize"),
}


@on_both
def test_refusals_leave_nothing_behind(apex, driver, platform):
    """The call and the driver's words are told; memory, context, device and mode are as before; the next try works."""
    driver.c.fake_set_capture_mode(1)
    apex.is_capturing(platform, 1)
    for call in CALLS[platform]:
        driver.fail(call, 1)
        status, address = apex.counters(platform, 1, driver.c.fake_stream(1))
        assert (status, address) == (DRIVER, None), call
        assert call in apex.last_error and "INVALID_VALUE" in apex.last_error.upper().replace(
            "ERRORINVALIDV", "INVALID_V"
        )
        driver.fail(call, 0)
        assert driver.c.fake_live() == 0 and driver.c.fake_capture_mode() == 1, call
        assert driver.c.fake_depth() == 0 if platform == CUDA else driver.c.fake_current() == 0
    stream = driver.c.fake_stream(1)
    status, block = apex.take_memory(platform, 1, stream, 100)
    assert status == OK, apex.last_error
    apex.give_memory_back(platform, 1, stream, 100, block)
    driver.fail(CALLS[platform][2], 1)
    assert apex.take_memory(platform, 1, stream, 100) == (DRIVER, None)
    driver.fail(CALLS[platform][2], 0)
    assert apex.take_memory(platform, 1, stream, 100) == (OK, block)  # it was not lost


@on_both
def test_sixteen_threads_at_once(apex, driver, platform):
    """One allocation a device, however many meet at the first; each stream has its own."""
    driver.c.fake_set_slowness(20000)
    gate = threading.Barrier(16)
    streams = [driver.c.fake_stream(index % 2) for index in range(16)]
    found = {}

    def work(index):
        gate.wait()
        found[index] = apex.counters(platform, index % 2, streams[index], 8)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [status for status, _ in found.values()] == [OK] * 16
    assert len({address for _, address in found.values()}) == 16
    assert len(allocations(driver.log())) == 2


@on_both
def test_fork(apex, driver, platform):
    """In the child the error is the launch's own, and what the parent took can be given back: nothing waits for the
    thread that made memory when the process forked."""
    stream = driver.c.fake_stream(0)
    _, block = apex.take_memory(platform, 0, stream, 100)
    driver.c.fake_set_slowness(500000)
    busy = threading.Thread(target=lambda: apex.take_memory(platform, 0, stream, 3 * MIB))
    busy.start()
    time.sleep(0.1)
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        apex.give_memory_back(platform, 0, stream, 100, block)
        found = (apex.counters(platform, 0, stream)[0], apex.take_memory(platform, 0, stream)[0])
        os._exit(0 if found == (FORKED, FORKED) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    busy.join()
    driver.c.fake_set_slowness(0)
    apex.give_memory_back(platform, 0, stream, 100, block)
    assert apex.take_memory(platform, 0, stream, 100) == (OK, block)


@fresh_process("cuda")
def test_memory_is_the_primary_contexts(apex, cuda):
    """A green context that is current stays, but what is made under it would end with it."""
    green = cuda.c.fake_context(1, b"green")
    cuda.c.cuInit(0)
    cuda.c.fake_push(green)
    assert apex.counters(CUDA, 1)[0] == OK, apex.last_error
    assert allocations(cuda.log()) == [f"allocate {2 * MIB} in primary 1"]
    assert cuda.c.fake_current() == green and cuda.c.fake_depth() == 1
    cuda.c.fake_push(cuda.c.fake_primary(1))
    assert apex.take_memory(CUDA, 1, None, 3 * MIB)[0] == OK
    assert cuda.log() == ["mode 2", f"allocate {4 * MIB} in primary 1", f"memset {4 * MIB}", "mode 0"]


def test_on_the_cpu(library):
    """Zeroed memory of the process; counters of each thread, for the executor of the tests."""
    apex = Apex(library)
    status, block = apex.take_memory(CPU, 0, None, 1000)
    assert status == OK and words(block, 250) == [0] * 250 and block % 64 == 0
    apex.give_memory_back(CPU, 0, None, 1000, block)
    found = [apex.counters(CPU, 0, None, 10)[1]]
    thread = threading.Thread(target=lambda: found.append(apex.counters(CPU, 0, None, 10)[1]))
    thread.start()
    thread.join()
    assert words(found[0], 10) == [0] * 10 and len(set(found)) == 2
    apex.give_memory_back(CPU, 0, None, 8, None)


@pytest.mark.parametrize("place", ((CUDA, 128), (CUDA, -1), (7, 0), (-1, 0)))
def test_no_such_place(library, place):
    """Said so; giving back nothing is nothing."""
    apex = Apex(library)
    assert apex.take_memory(*place)[0] == ARGUMENT and "no such place" in apex.last_error
    assert apex.c.apex_counters(None, 0, 1, ctypes.byref(ctypes.c_void_p())) == ARGUMENT
    apex.give_memory_back(*place, None, 8, None)
