"""Timing on a GPU: work in a CUDA graph with a cold L2, and wall time in eager mode."""

from __future__ import annotations

import statistics
import time

import torch

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
GIB = 1 << 30


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def copy_bandwidth(nbytes: int = GIB, repeats: int = 20) -> float:
    """Bytes a second, read and written, of a large device-to-device copy: what floors are divided by."""
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * nbytes / _median_event_time(lambda: target.copy_(source), repeats)


def graph_seconds(step, repeats: int = 20) -> float:
    """Median GPU time of one `step`, captured in a CUDA graph and replayed, L2 cold before each replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    return _median_event_time(graph.replay, repeats)


def event_seconds(step, repeats: int = 20) -> float:
    """Median GPU time of one `step` in eager mode, L2 cold before: for what cannot be captured because it waits.

    Where the host is slower than the GPU this is the host's time.
    """
    for _ in range(3):
        step()
    return _median_event_time(step, repeats)


def wall_seconds(step, rounds: int = 5, target: float = 0.05) -> float:
    """Median wall time of one `step` in eager mode, the queue drained at the end of each round of `target` seconds."""
    for _ in range(3):
        step()
    synchronize()
    start = time.perf_counter()
    step()
    synchronize()
    count = max(1, min(500, int(target / (time.perf_counter() - start))))
    results = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(count):
            step()
        synchronize()
        results.append((time.perf_counter() - start) / count)
    return statistics.median(results)


def attempt(measure, step):
    """(what measure(step) found, None), or (None, why it could not be measured)."""
    try:
        return measure(step), None
    except Exception as error:  # a peer that refuses is a result too
        synchronize()
        return None, f"{type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"


class ColdCache:
    """Brings the L2 cache, before each measurement, to a state that no implementation profits or suffers from.

    Four times its size is read from memory that nobody writes: all that the step before left there goes, and what
    it wrote is written back now. A fill would leave its own lines there, and the step that is measured would pay for
    writing them back, up to the size of the cache.
    """

    def __init__(self):
        size = getattr(torch.cuda.get_device_properties(), "L2_cache_size", 0)
        self.elements = torch.ones(max(256 << 20, 4 * size) // 4, device="cuda")
        self.sum = torch.empty((), device="cuda")

    def __call__(self) -> None:
        torch.sum(self.elements, 0, out=self.sum)


def _median_event_time(work, repeats, most=1.0):
    """Median of `repeats` times, of fewer (5 at least) where these take `most` seconds, after 3 that do not count."""
    cool, times = ColdCache(), []
    for i in range(3 + repeats):
        if i >= 3 + 5 and sum(times) > most:
            break
        cool()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(times[3:])
