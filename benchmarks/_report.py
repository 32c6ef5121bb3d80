"""Tables of benchmarks: a row is printed and written to the result file as soon as it is measured, so that a run that
is cut off leaves what it found."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # last: an apex that is installed comes first
from _measure import ON_GPU, attempt, copy_bandwidth, graph_seconds, wall_seconds

import apex
from apex._loader import layout
from build_matrix.store import digest

FIGURE = 9  # characters of a column of figures
COMPILE_SECONDS = 20  # for all of a run's compilations together: first come, first measured


def parse(parser, compiles=True, accuracy=True):
    """Adds what every benchmark of several implementations takes, and reads the command line.

    compiles: torch.compile is one of them. accuracy: errors can be shown, which needs no GPU; times do, and without one
    the program ends here.
    """
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--skip", default="-", help="implementations whose name contains this are left out")
    if compiles:
        parser.add_argument(
            "--without-compile", dest="skip", action="store_const", const="compile", help="as --skip compile"
        )
        parser.add_argument(
            "--compile-seconds", type=float, default=COMPILE_SECONDS, metavar="S",
            help="no torch.compile starts after S seconds of them (%(default)s)",
        )  # fmt: skip
    if accuracy:
        parser.add_argument("--accuracy", action="store_true", help="errors against float64 as well")
    parser.add_argument("--json", metavar="FILE", help="write the figures here, after each row")
    options = parser.parse_args()
    if not ON_GPU and not (accuracy and options.accuracy):
        parser.error("times need a GPU" + ("; without one there is --accuracy" if accuracy else ""))
    return options


def device_name() -> str:
    return torch.cuda.get_device_name() if ON_GPU else "CPU"


def source() -> dict:
    """What is measured: {"units": digest of each device source with its headers, "python": of the modules of apex}, of
    the apex that is imported."""
    package, device = Path(apex.__file__).parent, layout.device_sources()
    modules = {p.relative_to(package).as_posix(): digest.of_file(p) for p in sorted(package.rglob("*.py"))}
    units = {path.stem: digest.of_source(path) for path in sorted(device.glob("*.cu"))} if device else {}
    return {"units": units, "python": digest.of_values(modules)}


class Table:
    """Lines of cells under headings: columns of names with the widths given, then figures, then a remark.

    path: a JSON file of `facts` and all rows, whole at any time; None: none is written.
    """

    def __init__(self, title: str, headings: tuple[str, ...], widths: tuple[int, ...], path, facts: dict):
        self.widths, self.path, self.facts, self.rows = widths, path, facts, []
        print(title)
        self._print(headings, "")

    def add(self, row, cells: tuple[str, ...], remark: str = "") -> None:
        """Prints the cells and the remark of a row, a dataclass, and writes the file anew."""
        self.rows.append(row)
        self._print(cells, remark)
        if self.path is None:
            return
        written = f"{self.path}.{os.getpid()}"
        with open(written, "w") as file:
            json.dump({**self.facts, "rows": [dataclasses.asdict(r) for r in self.rows]}, file, indent=1)
        os.replace(written, self.path)

    def _print(self, cells, remark):
        names = [cell.ljust(width) for cell, width in zip(cells, self.widths, strict=False)]
        figures = [cell.rjust(FIGURE) for cell in cells[len(self.widths) :]]
        print("  ".join([*names, *figures, remark]).rstrip(), flush=True)


@dataclass
class Row:
    """One implementation of a case: seconds; floor_bytes is what the case must move, each tensor counted as the case
    says."""

    case: str
    implementation: str
    graph: float | None
    wall: float | None
    floor_bytes: int

    HEADINGS = ("case", "implementation", "GPU µs", "floor µs", "of floor", "wall µs")

    def cells(self, bandwidth: float) -> tuple[str, ...]:
        floor = self.floor_bytes / bandwidth
        return (
            self.case,
            self.implementation,
            f"{self.graph * 1e6:.1f}" if self.graph else "-",
            f"{floor * 1e6:.1f}",
            f"{100 * floor / self.graph:.1f} %" if self.graph else "-",
            f"{self.wall * 1e6:.1f}" if self.wall else "-",
        )


class Report:
    """The rows of a run on this card.

    options: what parse returned. bandwidth: bytes a second that floors are divided by, measured if None. rows: that
    an earlier report of the same run wrote to the same file.
    """

    def __init__(self, options, bandwidth: float | None = None, rows=()):
        self.options, self.bandwidth = options, bandwidth or copy_bandwidth()
        self.compiling = 0.0  # seconds
        facts = {
            "card": device_name(),
            "torch": torch.__version__,
            "copy": self.bandwidth,
            "source": source(),
        }
        title = f"{device_name()}, torch {torch.__version__}, copy {self.bandwidth / 1e9:.0f} GB/s"
        self.table = Table(title, Row.HEADINGS, (44, 24), options.json, facts)
        self.table.rows.extend(rows)

    @property
    def rows(self):
        return self.table.rows

    def wants(self, case: str, implementation: str = "") -> bool:
        return self.options.only.lower() in case.lower() and self.options.skip not in implementation

    def measure(self, case, implementation, step, floor_bytes, gpu=graph_seconds, wall=wall_seconds) -> None:
        """Measures the step, unless it is not wanted, with these functions (None: not at all), and adds the row.

        What cannot be measured has its reason beside it: a peer that refuses is a result too.
        """
        if not self.wants(case, implementation):
            return
        compiles, start, found, reasons = self._compiles(implementation), time.perf_counter(), [], []
        if compiles and self.compiling >= self.options.compile_seconds:
            found = [None, None]
            reasons = [f"{self.options.compile_seconds:g} s of compiling are over, see --compile-seconds"]
        elif "compile" in implementation:
            torch._dynamo.reset()  # a second shape would get code for any shape
        for function in (gpu, wall)[len(found) :]:
            seconds, reason = attempt(function, step) if function else (None, None)
            found.append(seconds)
            if reason and reason not in reasons:
                reasons.append(reason)
        if compiles:
            self.compiling += time.perf_counter() - start
        row = Row(case, implementation, *found, int(floor_bytes))
        remark = f"not measured: {'; '.join(reasons)}" if reasons else ""
        self.table.add(row, row.cells(self.bandwidth), remark)

    @staticmethod
    def _compiles(implementation: str) -> bool:
        """Whether a first call takes seconds of compiling."""
        return "compile" in implementation or "Quack" in implementation

    def end(self) -> None:
        """Prints which variants served."""
        print("served by", sorted(set(apex.served().items())), flush=True)


def print_errors(title: str, names, found, expected) -> None:
    """The largest and the root mean square error of each tensor found, under its name."""
    texts = []
    for name, tensor, exact in zip(names, found, expected, strict=False):
        errors = (tensor.double() - exact).abs()
        texts.append(f"{name} {errors.max().item():.2e} / {errors.square().mean().sqrt().item():.2e}")
    print(f"  {title}: max / rms error of {', '.join(texts)}", flush=True)
