"""CPU variants run on torch's threads: as many as torch has, none of their own, and inline in a forked child."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from host import build
from op_samples import Call, samples

from apex._loader import bindings, mapped

Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
TICK = 1 / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def parallel_for():
    """apex_torch_parallel_for, which libapex.so is lent."""
    loaded = bindings.load()
    if not loaded.native:
        pytest.skip(f"no binding: {loaded.reason}")
    function = library_of_torch().apex_torch_parallel_for
    function.argtypes = [*[ctypes.c_int64] * 3, Body, ctypes.c_void_p]
    function.restype = None
    return function


def library_of_torch():
    """libapex_torch.so, which is loaded."""
    return ctypes.CDLL(next(path for path in mapped.paths() if Path(path).name == bindings.LIBRARY))


@pytest.fixture(autouse=True)
def threads():
    """The test sets torch's number of threads; it comes back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def pieces_of(parallel_for, begin, end, grain):
    """[(first, last, thread)] in order; each takes so long that every thread gets one."""
    found = []

    def body(_, first, last):
        found.append((first, last, threading.get_native_id()))
        time.sleep(0.02)

    parallel_for(begin, end, grain, Body(body), None)
    return sorted(found)


@pytest.mark.parametrize("count", (1, 2, 3))
def test_as_many_threads_as_torch_has(parallel_for, threads, count):
    """The range is cut without gap or overlap; the caller's thread is one of them."""
    threads(count)
    found = pieces_of(parallel_for, 5, 1005, 10)
    assert len({thread for _, _, thread in found}) == len(found) == count
    assert threading.get_native_id() in {thread for _, _, thread in found}
    edges = [first for first, _, _ in found] + [found[-1][1]]
    assert edges[0] == 5 and edges[-1] == 1005 and [last for _, last, _ in found] == edges[1:]


def test_small_ranges_stay_on_the_callers_thread(parallel_for, threads):
    """No more pieces than there are grains; an empty range is none."""
    threads(3)
    here = threading.get_native_id()
    assert pieces_of(parallel_for, 0, 1000, 1000) == [(0, 1000, here)]
    assert [piece[:2] for piece in pieces_of(parallel_for, 0, 1000, 600)] == [(0, 500), (500, 1000)]
    assert pieces_of(parallel_for, 7, 7, 1) == pieces_of(parallel_for, 7, 3, 1) == []


def test_a_parallel_region_within_one_stays_on_its_thread(parallel_for, threads):
    """Nothing is oversubscribed, nothing waits for itself."""
    threads(2)
    inner = []

    def body(_, first, last):
        here = threading.get_native_id()
        inner.append({thread for _, _, thread in pieces_of(parallel_for, 0, 1000, 1)} == {here})

    parallel_for(0, 2, 1, Body(body), None)
    assert inner == [True, True]


def test_what_a_thread_throws_is_thrown_by_the_caller(parallel_for, threads, tmp_path):
    """Also from a thread that is not the caller's."""
    threads(2)
    source = tmp_path / "throws.cpp"
    source.write_text("""
        #include <cstdint>
        #include <stdexcept>
        using Body = void (*)(void*, int64_t, int64_t);
        using ParallelFor = void (*)(int64_t, int64_t, int64_t, Body, void*);
        void throws_at_the_end(void*, int64_t, int64_t last) {
          if (last == 1000) throw std::out_of_range("the end");
        }
        extern "C" __attribute__((visibility("default"))) int caught(ParallelFor parallel_for) {
          try {
            parallel_for(0, 1000, 1, throws_at_the_end, nullptr);
          } catch (const std::out_of_range&) {
            return 1;
          }
          return 0;
        }
    """)
    throws = ctypes.CDLL(str(build.build_shared("throws.so", source)))
    assert throws.caught(parallel_for) == 1


def seconds_of_threads():
    """CPU time of each thread of this process."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            fields = (task / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended
            continue
        found[int(task.name)] = (int(fields[11]) + int(fields[12])) * TICK
    return found


def threads_that_worked(work, least=0.1, within=20.0):
    """How many threads of this process spent `least` seconds on calls of `work`, within so many seconds."""
    before, begun = seconds_of_threads(), time.monotonic()
    while True:
        work()
        spent = [now - before.get(thread, 0.0) for thread, now in seconds_of_threads().items()]
        busy = sum(seconds >= least for seconds in spent)
        if busy > 1 or (busy == 1 and sum(spent) > 10 * least) or time.monotonic() - begun > within:
            return busy


def large_op(name):
    """A call of one op whose CPU variant has plenty to do."""
    x = torch.randn(4096, 1024, dtype=torch.float32, device="cpu")
    weight = torch.ones(1024, dtype=torch.float32, device="cpu")
    if name == "layer_norm":
        return lambda: torch.ops.apex.layer_norm_forward(x, [1024], weight)[0]
    if name == "softmax":
        return lambda: torch.ops.apex.scaled_masked_softmax_forward(x.view(1, 1, 4096, 1024))
    total = torch.zeros(1, dtype=torch.float32, device="cpu")
    return lambda: torch.ops.apex.multi_tensor_l2norm([x], total) or total


@pytest.mark.parametrize("op", ("layer_norm", "softmax", "l2norm"))
def test_ops_use_the_threads_that_torch_has(parallel_for, threads, op):
    work = large_op(op)
    threads(1)
    one = work().clone()
    assert threads_that_worked(work) == 1
    threads(2)
    assert threads_that_worked(work) == 2
    assert torch.equal(work(), one)


@pytest.mark.parametrize(("op", "index"), [(op, index) for op, index in samples() if index is not None])
def test_the_result_does_not_tell_how_many_threads_worked(parallel_for, threads, op, index):
    """Sums are cut where the data says, not where the threads do; but torch's convolution by the threads' number."""
    call, loose = Call(op, index, "cpu"), 1e-5 if op.startswith("conv_") else 0
    threads(1)
    one = call.run()
    for count in (2, 3):
        threads(count)
        for found, wanted in zip(call.run(), one, strict=True):
            torch.testing.assert_close(found, wanted, rtol=loose, atol=100 * loose, equal_nan=True)


def in_child(body, within=60):
    """Forks; whether `body` was true there. A child that hangs is ended."""
    child = os.fork()
    if child == 0:
        answer = 1
        try:
            answer = 0 if body() else 1
        finally:
            os._exit(answer)
    end = time.monotonic() + within
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail(f"the forked child did not end within {within} s")


def test_a_forked_child_computes(parallel_for, threads):
    """GNU's OpenMP, and so torch's own operators, hang in a child whose parent used threads; apex's run inline."""
    threads(2)
    work = large_op("layer_norm")
    want = work().numpy()

    def child():
        return bool((work().numpy() == want).all()) and threads_that_worked(work) == 1

    assert in_child(child)
    assert torch.equal(work(), torch.from_numpy(want))  # and the parent goes on


def test_threads_of_python_at_once(parallel_for, threads):
    """Each thread that calls gets its result, and the lock of Python is free meanwhile."""
    threads(2)
    work = large_op("softmax")
    want, results = work(), []
    callers = [threading.Thread(target=lambda: results.append(torch.equal(work(), want))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert results == [True] * 4
