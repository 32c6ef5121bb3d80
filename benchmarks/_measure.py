"""Timing on a GPU: work in a CUDA graph with a cold L2, wall time in eager mode, and the byte floor."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from dataclasses import dataclass

import torch

GIB = 1 << 30


def copy_bandwidth(nbytes: int = GIB, repeats: int = 20) -> float:
    """Bytes a second, read and written, of a large device-to-device copy: what floors are divided by."""
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = _median_event_time(lambda: target.copy_(source), repeats, flush=_flush_buffer())
    return 2 * nbytes / seconds


def graph_seconds(step, repeats: int = 20) -> float:
    """Median GPU time of one `step`, captured in a CUDA graph and replayed, L2 flushed before each replay."""
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
    return _median_event_time(graph.replay, repeats, flush=_flush_buffer())


def event_seconds(step, repeats: int = 20) -> float:
    """Median GPU time of one `step` in eager mode, L2 flushed before: for what cannot be captured because it waits.

    Where the host is slower than the GPU this is the host's time.
    """
    for _ in range(3):
        step()
    return _median_event_time(step, repeats, flush=_flush_buffer())


def wall_seconds(step, rounds: int = 5, target: float = 0.1) -> float:
    """Median wall time of one `step` in eager mode, the queue drained at the end of each round."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    count = max(3, min(500, int(target / (time.perf_counter() - start))))
    results = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(count):
            step()
        torch.cuda.synchronize()
        results.append((time.perf_counter() - start) / count)
    return statistics.median(results)


def _flush_buffer():
    return torch.empty(256 << 20, dtype=torch.uint8, device="cuda")


def _median_event_time(work, repeats, flush):
    times = []
    for i in range(repeats + 3):
        flush.fill_(i & 0xFF)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(times[3:])


@dataclass
class Row:
    """One line of a table: floor_bytes is what the case must move, each tensor counted as the case says."""

    case: str
    implementation: str
    graph: float | None
    wall: float | None
    floor_bytes: int

    def cells(self, bandwidth: float) -> tuple[str, ...]:
        floor = self.floor_bytes / bandwidth
        fraction = f"{100 * floor / self.graph:.1f} %" if self.graph else "-"
        return (
            self.case,
            self.implementation,
            f"{self.graph * 1e6:.1f}" if self.graph else "-",
            f"{floor * 1e6:.1f}",
            fraction,
            f"{self.wall * 1e6:.1f}" if self.wall else "-",
        )


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


HEADINGS = ("case", "implementation", "GPU µs", "floor µs", "of floor", "wall µs")


def print_table(rows: list[Row], bandwidth: float) -> None:
    """The rows as aligned text, under a line that names card, versions and the measured copy bandwidth."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth / 1e9:.0f} GB/s")
    print_lines([HEADINGS, *(row.cells(bandwidth) for row in rows)])


def print_lines(table: list[tuple[str, ...]]) -> None:
    """Lines of cells, the headings first, as aligned text: two columns of names, then figures."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        left = "  ".join(cell.ljust(width) for cell, width in zip(line[:2], widths[:2], strict=True))
        print(left, "  ".join(cell.rjust(width) for cell, width in zip(line[2:], widths[2:], strict=True)))


def write_json(path: str, rows: list[Row], bandwidth: float) -> None:
    """The rows, and what print_table's first line says, as a file."""
    with open(path, "w") as file:
        json.dump(
            {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "copy": bandwidth,
             "rows": [dataclasses.asdict(row) for row in rows]}, file, indent=1
        )  # fmt: skip


def max_and_rms(errors: torch.Tensor) -> str:
    """The largest and the root mean square of absolute errors."""
    return f"{errors.max().item():.2e} / {errors.square().mean().sqrt().item():.2e}"


def attempt(measure, step):
    """The measurement, or None with a line that says why it could not be made."""
    try:
        return measure(step)
    except Exception as error:  # a peer that refuses is a result too
        torch.cuda.synchronize()
        print(f"  not measured: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
        return None
