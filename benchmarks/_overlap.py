"""Which part of the collectives' time on a GPU runs beside other kernels: from the events of torch.profiler's trace."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

PRODUCTS = ("gemm", "cutlass", "nvjet", "cublas", "xmma")
OF_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def without_multicast() -> None:
    """To be called before a process group is made: NCCL uses no multicast over NVLink."""
    os.environ["NCCL_NVLS_ENABLE"] = "0"


@dataclass(frozen=True)
class Kernel:
    """What a GPU did: begin and end in µs, and the number of the stream."""

    name: str
    stream: int
    begin: float
    end: float

    @property
    def collective(self) -> bool:
        return self.name.lower().startswith("nccl")

    @property
    def product(self) -> bool:
        return not self.collective and any(word in self.name.lower() for word in PRODUCTS)


def kernels(events) -> list[Kernel]:
    """What the GPU did, by the `traceEvents` of a Chrome trace, in the order of time."""
    found = [
        Kernel(
            e["name"], e.get("args", {}).get("stream", 0), float(e["ts"]), float(e["ts"]) + float(e["dur"])
        )
        for e in events
        if e.get("ph") == "X" and e.get("cat") in OF_GPU
    ]
    return sorted(found, key=lambda kernel: kernel.begin)


def merged(spans) -> list[tuple[float, float]]:
    """The same times in spans (begin, end) that do not touch, in their order."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def length(spans) -> float:
    return sum(end - begin for begin, end in spans)


def common(first, second) -> float:
    """For how long one of the `first` and one of the `second` spans were under way at once."""
    first, second, total = merged(first), merged(second), 0.0
    i = j = 0
    while i < len(first) and j < len(second):
        total += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total


@dataclass(frozen=True)
class Overlap:
    """Times in µs: of collectives; of these beside products, and beside any other kernel; of the other kernels; and of
    all from the first kernel's begin to the last one's end."""

    collectives: float
    beside_products: float
    beside_any: float
    others: float
    elapsed: float

    @classmethod
    def of(cls, found: list[Kernel]) -> Overlap:
        collectives, products, others = (
            merged((k.begin, k.end) for k in found if chosen(k))
            for chosen in (lambda k: k.collective, lambda k: k.product, lambda k: not k.collective)
        )
        elapsed = max(k.end for k in found) - min(k.begin for k in found) if found else 0.0
        beside = (common(collectives, spans) for spans in (products, others))
        return cls(length(collectives), *beside, length(others), elapsed)

    def __str__(self) -> str:
        def part(time):
            return f"{time:.0f} us ({100 * time / self.collectives:.0f} %)" if self.collectives else "-"

        return (
            f"collectives: {self.collectives:.0f} us, of which {part(self.beside_products)} beside products, "
            f"{part(self.beside_any)} beside any kernel; other kernels {self.others:.0f} us, all {self.elapsed:.0f} us"
        )


def longest(found: list[Kernel], count: int = 8) -> list[str]:
    """Lines: the kernels that took most, of the same name together: µs, how many, and the name."""
    times: dict[str, list[float]] = {}
    for kernel in found:
        times.setdefault(kernel.name, []).append(kernel.end - kernel.begin)
    order = sorted(times, key=lambda name: -sum(times[name]))[:count]
    return [f"{sum(times[name]):9.0f} us {len(times[name]):5d} x {name[:90]}" for name in order]


def _nothing() -> None:
    pass


def traced(step, path=None, before=_nothing, after=_nothing) -> list[Kernel]:
    """What the GPU did in one `step` of this rank, which every rank calls, between before() and after().

    path: where the trace is written, or None. A first step under the profiler, whose set-up takes its time, does not
    count.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    for _ in range(2):
        before()
        _together()
        with torch.profiler.profile(activities=activities) as profiler:
            step()
            _synchronize()
        after()
    with contextlib.ExitStack() as stack:
        path = Path(path or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "trace.json")
        profiler.export_chrome_trace(str(path))
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt") as file:
            return kernels(json.load(file)["traceEvents"])


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _together() -> None:
    """Every rank is here, and its GPU has nothing to do."""
    _synchronize()
    if dist.is_initialized():
        dist.barrier()
        _synchronize()
