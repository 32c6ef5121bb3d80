"""The tables of README.md, made from the registry, the matrix and the measurements in benchmarks/results."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from build_matrix import REPOSITORY, host_compiler, matrix
from build_matrix.registry import Registry

README = REPOSITORY / "README.md"
RESULTS = REPOSITORY / "benchmarks" / "results"
ELEMENT_TYPES = ("bf16", "f16", "f32", "f64")


def _table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [headings, tuple("---" for _ in headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def install() -> str:
    """One pip line for each accelerator."""
    rows = []
    for accelerator in matrix.load().accelerators:
        name = accelerator.name
        root = accelerator.roots[0]
        rows.append((name, f"`pip install apex-{name}==1.10 --index-url <index>/whl/{root}/`"))
    return _table(("accelerator", "command"), rows)


def extensions() -> str:
    """Every import name with its state and build switches."""
    rows = []
    for e in Registry.load().extensions:
        state = "here" if e.state == "complete" else f"planned{f', {e.release}' if e.release else ''}"
        rows.append((f"`{e.name}`", state, f"`{e.variable}=1`", f"`--{e.option}`"))
    return _table(("import name", "state", "variable", "option"), rows)


def support() -> str:
    """Ops with what their kernels take; all packs are built from the same sources."""
    packs = [pack.arch.name for pack in matrix.load().packs]
    rows = []
    for op in dict.fromkeys(op for e in Registry.load().extensions for op in e.ops):
        names = kernels(op)
        types = [t for t in ELEMENT_TYPES if any(t in re.split(r"_|x\d", name) for name in names)]
        rows.append((f"`{op}`", str(len(names) or ""), ", ".join(types)))
    return f"Packs: {', '.join(packs)}.\n\n" + _table(("op", "kernels", "element types"), rows)


def kernels(op: str) -> list[str]:
    """Names of the kernels in an op's device source, after the op's own; none for an op of the host alone."""
    source = REPOSITORY / "csrc" / "device" / f"{op}.cu"
    if not source.is_file():
        return []
    includes = [f"-I{REPOSITORY / folder}" for folder in ("csrc", "csrc/device")]
    flags = ["-E", "-P", "-x", "c++", "-std=c++17", "-DGPU_SIMT", "-DGPU_WARP_SIZE=32", *includes]
    done = subprocess.run([host_compiler.find().path, *flags, source], capture_output=True, text=True, check=True)
    return sorted(set(re.findall(rf"\bvoid {op}_(\w+)\(", done.stdout)))


def speed() -> str:
    """The newest recorded run of benchmarks/optimizers.py."""
    files = sorted(RESULTS.glob("optimizers-*.json"))
    if not files:
        return "No run is recorded."
    result = json.loads(files[-1].read_text(encoding="utf-8"))
    bandwidth = result["copy"]
    rows = []
    for row in result["rows"]:
        if not row["graph"]:
            continue
        fraction = f"{100 * row['floor_bytes'] / bandwidth / row['graph']:.1f} %"
        wall = f"{row['wall'] * 1e6:.0f}" if row["wall"] else ""
        rows.append((row["case"], row["implementation"], f"{row['graph'] * 1e6:.0f}", fraction, wall))
    heading = f"{result['card']}, torch {result['torch']}, copy {bandwidth / 1e9:.0f} GB/s"
    return f"{heading}:\n\n" + _table(("case", "implementation", "GPU µs", "of floor", "wall µs"), rows)


SECTIONS = {"install": install, "extensions": extensions, "support": support, "speed": speed}


def render(text: str) -> str:
    """README's text with every generated section made anew."""
    for name, section in SECTIONS.items():
        begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->"
        head, rest = text.split(begin, 1)
        _, tail = rest.split(end, 1)
        text = f"{head}{begin}{section()}\n{end}{tail}"
    return text


def write(path: Path = README) -> None:
    """Writes the file anew, by way of a temporary name."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    write()
