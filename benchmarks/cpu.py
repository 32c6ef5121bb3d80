"""Every op that has a CPU variant beside torch's own on the same threads: time of forward, and of both.

usage: python benchmarks/cpu.py [--only softmax] [--threads 1 2] [--dtypes float32 bfloat16] [--json FILE]
       python benchmarks/cpu.py --again FILE    # what was slower there, once more: FILE has the least of all runs

The two are measured in turns of a few milliseconds, and of each the least time counts, so that what else runs on the
machine slows down both, or neither. One thread's time is the processor's, without that of others; several threads' is
wall time. A forward alone is without autograd. Ratios above 1: apex is slower. The allocator
keeps what is freed: else whether the kernel must find pages anew, a matter of chance, is most of a large case's time.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import random
import time
from dataclasses import dataclass

import torch
from _cpu_cases import Case, cases
from _report import Table, source

import apex

TURN, TURNS = 1e-3, 15  # seconds of one, at least; how many, at least
DTYPES = {str(d)[6:]: d for d in (torch.float32, torch.bfloat16)}


@dataclass
class CpuRow:
    """Seconds of one case."""

    case: str
    dtype: str
    threads: int
    passes: str
    apex: float
    torch: float

    HEADINGS = ("case", "dtype", "passes", "threads", "apex µs", "torch µs", "ratio")

    @property
    def key(self):
        return self.case, self.dtype, self.threads, self.passes

    @property
    def ratio(self) -> float:
        return self.apex / self.torch

    def cells(self) -> tuple[str, ...]:
        names = (self.case, self.dtype, self.passes)
        return (
            *names,
            str(self.threads),
            f"{self.apex * 1e6:.1f}",
            f"{self.torch * 1e6:.1f}",
            f"{self.ratio:.2f}",
        )


def keep_freed_memory() -> None:
    """As glibc's malloc does when it is told to; other allocators stay as they are."""
    mmap_max, trim_threshold = -4, -1
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, (1 << 31) - 1)


def in_turns(functions, seconds: float, clock=time.perf_counter) -> list[float]:
    """The least seconds a call of each function by a clock, in turns for about `seconds`, `TURNS` of them at least.

    In no fixed order: where other processes take turns on the machine too, one function would always be met by them.
    """
    counts, least = [], [float("inf")] * len(functions)
    for function in functions:
        function()
        start = time.perf_counter()
        function()
        counts.append(max(1, int(TURN / (time.perf_counter() - start))))
    end, turns = time.perf_counter() + seconds, 0
    order = list(range(len(functions)))
    while turns < TURNS or time.perf_counter() < end:
        turns += 1
        random.shuffle(order)
        for i in order:
            function, calls = functions[i], range(counts[i])
            start = clock()
            for _ in calls:
                function()
            least[i] = min(least[i], (clock() - start) / counts[i])
    return least


def passes_of(case: Case):
    """(name, what apex does, what torch does) of each direction."""
    if not case.inputs:
        yield "step", case.ours, case.torchs
        return

    def forward(function):
        def run():
            with torch.no_grad():
                function()

        return run

    yield "forward", forward(case.ours), forward(case.torchs)
    gradient = torch.randn_like(case.ours())

    def both(function):
        def run():
            y = function()
            torch.autograd.grad(y, case.inputs, gradient.to(y.dtype), allow_unused=True)

        return run

    yield "both", both(case.ours), both(case.torchs)


def rows_of(path: str | None) -> dict:
    """Key -> row of a result."""
    if path is None:
        return {}
    with open(path) as file:
        rows = [CpuRow(**row) for row in json.load(file)["rows"]]
    return {row.key: row for row in rows}


def measure(options, table, before: dict) -> None:
    """Adds every row that is wanted: all of the cases that the options name or, of rows before, those behind."""
    wanted = {key for key, row in before.items() if row.ratio > options.behind} if before else None
    places = {key: place for place, key in enumerate(before)}
    for name, make in cases():
        for dtype in options.dtypes:
            known = wanted is None or any(key[:2] == (name, dtype) for key in wanted)
            if options.only.lower() not in name.lower() or not known:
                continue
            torch.manual_seed(0)
            for passes, ours, torchs in passes_of(make(DTYPES[dtype])):
                for threads in options.threads:
                    key = name, dtype, threads, passes
                    if wanted is not None and key not in wanted:
                        continue
                    torch.set_num_threads(threads)
                    clock = time.thread_time if threads == 1 else time.perf_counter
                    least = in_turns([ours, torchs], options.seconds, clock)
                    if before:
                        old = before[key]
                        least = [min(least[0], old.apex), min(least[1], old.torch)]
                    row = CpuRow(*key, *least)
                    table.rows[:] = [other for other in table.rows if other.key != key]
                    table.add(row, row.cells(), "behind" if row.ratio > options.behind else "")
                    if before:  # each row in its old place, the next time that they are written
                        table.rows.sort(key=lambda other: places[other.key])
            gc.collect()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--seconds", type=float, default=0.2, help="for a row (%(default)s)")
    parser.add_argument(
        "--behind", type=float, default=1.02, help="rows above this ratio are marked (%(default)s)"
    )
    parser.add_argument(
        "--again", metavar="FILE", help="only the rows that were behind in this result, which is written anew"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures here, after each row")
    options = parser.parse_args()
    keep_freed_memory()
    level = torch.backends.cpu.get_cpu_capability()
    facts = {"cpu": level, "torch": torch.__version__, "source": source()}
    table = Table(
        f"{level}, torch {torch.__version__}",
        CpuRow.HEADINGS,
        (42, 9, 8),
        options.again or options.json,
        facts,
    )
    before = rows_of(options.again)
    table.rows.extend(before.values())
    measure(options, table, before)
    behind = sorted((row for row in table.rows if row.ratio > options.behind), key=lambda row: -row.ratio)
    print(f"{len(behind)} of {len(table.rows)} above {options.behind}")
    if behind:
        print("worst:", *behind[0].cells())
    print("served by", sorted(set(apex.served().items())))


if __name__ == "__main__":
    main()
