"""The speed tables, from the newest recorded run of each benchmark (benchmarks/results): all of it in docs/speed.md,
one case of each benchmark at its top."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from build_matrix import REPOSITORY
from build_matrix.site.markdown import filled, table
from build_matrix.spec.registry import device_units
from build_matrix.store import digest

RESULTS = REPOSITORY / "benchmarks" / "results"
OURS, NOW = "apex", "Of these sources."
CPU, TIE = "cpu", 1.02  # benchmarks/cpu.py; up to which ratio of its times two are called equal
# Units whose kernels a benchmark measures; others: all.
UNITS = {
    "bias_swiglu": ("bias_activation",),
    "fp8_casts": (
        "fp8_quantize",
        "fp8_dequantize",
        "fp8_transpose",
        "fp8_update_scales",
        "fp8_quantize_blocks",
        "fp8_layer_norm",
        "fp8_rms_norm",
    ),
    "group_norm": ("group_norm",),
    "norms": ("layer_norm", "rms_norm"),
    "optimizers": tuple(path.stem for path in device_units() if path.stem.startswith("multi_tensor_")),
    "rotary": ("rope",),
    "softmax": ("scaled_masked_softmax",),
    "transducer": ("transducer_joint", "transducer_loss"),
    "xentropy": ("xentropy",),
}


@dataclass(frozen=True)
class Run:
    """What one file of benchmarks/results holds."""

    benchmark: str
    result: dict

    @property
    def heading(self) -> str:
        r = self.result
        return f"{r['card']}, torch {r['torch']}, copy {r['copy'] / 1e9:.0f} GB/s"

    @cached_property
    def cases(self) -> dict[str, dict[str, dict]]:
        """Case -> implementation -> its row."""
        found: dict[str, dict[str, dict]] = {}
        for row in self.result["rows"]:
            found.setdefault(row["case"], {})[row["implementation"]] = row
        return found

    def share(self, row: dict) -> float:
        """Of the floor: the time in which the case's bytes could be copied."""
        return row["floor_bytes"] / self.result["copy"] / row["graph"]

    def sources(self, now: dict[str, str]) -> str:
        """What the figures are of, where the device units have the digests `now`."""
        measured = self.result.get("source", {}).get("units")
        if measured is None:
            return "**Of earlier sources**, which were not written down."
        mine = UNITS.get(self.benchmark, tuple(now))
        if changed := [unit for unit in mine if measured.get(unit) != now.get(unit)]:
            return (
                f"**Of other sources than these**: since then {', '.join(f'`{u}`' for u in changed)} changed."
            )
        return NOW


def _newest(folder: Path) -> dict[str, dict]:
    """Benchmark -> its newest result."""
    newest = {file.name.split("-")[0]: file for file in sorted(folder.glob("*.json"))}
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in newest.items()}


def runs(folder: Path = RESULTS) -> list[Run]:
    """The newest run of each benchmark on a GPU."""
    return [Run(name, result) for name, result in _newest(folder).items() if name != CPU]


def sources() -> dict[str, str]:
    """Device unit -> digest of its source with all its headers."""
    return {path.stem: digest.of_source(path) for path in device_units()}


def ours(rows: dict[str, dict]) -> dict | None:
    """The first of apex's implementations that was measured in a graph."""
    return next((row for name, row in rows.items() if name.startswith(OURS) and row["graph"]), None)


def others(rows: dict[str, dict]) -> list[dict]:
    """What is not apex's, fastest first."""
    found = [row for name, row in rows.items() if not name.startswith(OURS) and row["graph"]]
    return sorted(found, key=lambda row: row["graph"])


def whole(folder: Path = RESULTS) -> str:
    """Every case of every benchmark with every implementation: GPU time, its fraction of the floor, wall time."""
    return "\n\n".join(_whole(run, sources()) for run in runs(folder)) or "No run is recorded."


def _whole(run: Run, now: dict[str, str]) -> str:
    rows = []
    for case, measured in run.cases.items():
        fastest = min((r["graph"] for r in measured.values() if r["graph"]), default=None)
        for name, row in measured.items():
            gpu = f"{_microseconds(row['graph'])}{' (fastest)' if row['graph'] == fastest else ''}"
            share = f"{100 * run.share(row):.0f} %" if row["graph"] else ""
            rows.append((case, name, gpu if row["graph"] else "", share, _microseconds(row["wall"])))
    headings = ("case", "implementation", "GPU µs", "of the floor", "wall µs")
    said = filled(f"{run.heading}. {run.sources(now)}")
    return f"## `benchmarks/{run.benchmark}.py`\n\n{said}\n\n{table(headings, rows)}"


def _microseconds(seconds: float | None) -> str:
    if not seconds:
        return ""
    return f"{seconds * 1e6:.0f}" if seconds >= 100e-6 else f"{seconds * 1e6:.1f}"


def brief(folder: Path = RESULTS) -> str:
    """The first case of each benchmark, the card, and how often something else was faster."""
    found, rows, slower = runs(folder), [], []
    for run in found:
        compared = [(case, ours(m), others(m)) for case, m in run.cases.items()]
        slower += [
            case for case, mine, rest in compared if mine and rest and rest[0]["graph"] < mine["graph"]
        ]
        case, mine, rest = next((c for c in compared if c[1] and c[2]), compared[0])
        best = f"{rest[0]['implementation']}: {_microseconds(rest[0]['graph'])}" if rest else ""
        rows.append((case, _microseconds(mine["graph"]), f"{100 * run.share(mine):.0f} %", best))
    if not rows:
        return "No run is recorded."
    cards = ", ".join(dict.fromkeys(f"{run.result['card']}, torch {run.result['torch']}" for run in found))
    total, now = sum(len(run.cases) for run in found), sources()
    text = f"{cards}; the first case of each benchmark. In {len(slower)} of {total} cases something else was faster."
    if [run for run in found if run.sources(now) != NOW]:
        text += " Some of it is of other sources than these: the tables say which."
    return f"{filled(text)}\n\n{table(('case', 'apex, µs', 'of the floor', 'fastest other, µs'), rows)}"


def of_cpu(folder: Path = RESULTS) -> str:
    """Every case of benchmarks/cpu.py: apex's time, torch's and their ratio by the number of threads, forward and both
    passes."""
    result = _newest(folder).get(CPU)
    if result is None:
        return "No run is recorded."
    cases: dict[tuple[str, str, str], dict[int, dict]] = {}
    for row in result["rows"]:
        cases.setdefault((row["case"], row["dtype"], row["passes"]), {})[row["threads"]] = row
    threads = sorted({row["threads"] for row in result["rows"]})
    text = (
        f"{result['cpu']}, torch {result['torch']}. In {len(behind(result['rows']))} of {len(result['rows'])} rows "
        f"torch is faster by more than {100 * (TIE - 1):.0f} %."
    )
    headings = ["case", "dtype", "passes"]
    for n in threads:
        headings += [f"apex, {n} thread{'s' * (n > 1)}, µs", "torch", "ratio"]
    rows = [
        (*key, *(cell for n in threads for cell in _cpu_cells(found.get(n)))) for key, found in cases.items()
    ]
    return f"{filled(text)}\n\n{table(tuple(headings), rows)}"


def behind(rows: list[dict]) -> list[dict]:
    """Of rows of benchmarks/cpu.py those in which torch is faster."""
    return [row for row in rows if row["apex"] > TIE * row["torch"]]


def _cpu_cells(row: dict | None) -> tuple[str, str, str]:
    if row is None:
        return "", "", ""
    return _microseconds(row["apex"]), _microseconds(row["torch"]), f"{row['apex'] / row['torch']:.2f}"
