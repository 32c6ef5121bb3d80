"""The tables of README.md, docs/support.md, docs/speed.md and this version's release notes, made from the registry, the
matrix, the pins, the changelog, the receipts and the measurements in benchmarks/results."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from apex._loader import ask
from build_matrix import REPOSITORY
from build_matrix.check import receipts
from build_matrix.serve import install_line
from build_matrix.site import speed
from build_matrix.site.markdown import filled, table
from build_matrix.spec import changes, identity, matrix, pins
from build_matrix.spec.registry import Registry
from build_matrix.store import files
from build_matrix.toolchains import host_compiler

README = REPOSITORY / "README.md"
SUPPORT = REPOSITORY / "docs" / "support.md"
SPEED = REPOSITORY / "docs" / "speed.md"
NPU = REPOSITORY / "docs" / "npu.md"
ELEMENT_TYPES = ("bf16", "f16", "f32", "f64")


def install() -> str:
    """For each accelerator with code the line that brings torch, and pip's line for apex."""
    axes = matrix.load()
    return _install(axes.compiled(a.name for a in axes.accelerators))


def npu_install() -> str:
    """The same for NPUs."""
    return _install([a.name for a in matrix.load().accelerators if a.pure])


def npu_versions() -> str:
    """CANN x torch x torch_npu x Python, the newest CANN first."""
    rows = [
        (row.cann, row.torch, row.torch_npu, ", ".join(map(matrix.dotted, row.python)))
        for row in reversed(matrix.load().npu)
    ]
    return table(("CANN", "torch", "torch_npu", "Python"), rows)


def _install(names: list[str]) -> str:
    rows = [(name, f"`{install_line.torch(name)}`", f"`{install_line.line(name)}`") for name in names]
    return table(("for", "torch, where there is none yet", "apex"), rows)


def extensions() -> str:
    """Every import name with its state and build switches."""
    rows = []
    for e in Registry.load().extensions:
        state = "here" if e.state == "complete" else f"planned{f', {e.release}' if e.release else ''}"
        rows.append((f"`{e.name}`", state, f"`{e.variable}=1`", f"`--{e.option}`"))
    return table(("import name", "state", "variable", "option"), rows)


def support() -> str:
    """Ops with what their kernels take; all packs are built from the same sources."""
    packs = [pack.arch.name for pack in matrix.load().packs]
    rows = []
    for op in dict.fromkeys(op for e in Registry.load().extensions for op in e.ops):
        names = kernels(op)
        types = [t for t in ELEMENT_TYPES if any(t in re.split(r"_|x\d", name) for name in names)]
        rows.append((f"`{op}`", str(len(names) or ""), ", ".join(types)))
    return filled(f"Packs: {', '.join(packs)}.") + "\n\n" + table(("op", "kernels", "element types"), rows)


def kernels(op: str) -> list[str]:
    """Names of the kernels in an op's device source, after the op's own; none for an op of the host alone."""
    source = REPOSITORY / "csrc" / "device" / f"{op}.cu"
    if not source.is_file():
        return []
    includes = [f"-I{REPOSITORY / folder}" for folder in ("csrc", "csrc/device")]
    flags = ["-E", "-P", "-x", "c++", "-std=c++17", "-DGPU_SIMT", "-DGPU_WARP_SIZE=32", *includes]
    done = subprocess.run(
        [host_compiler.find().path, *flags, source], capture_output=True, text=True, check=True
    )
    return sorted(set(re.findall(rf'extern "C"[^;{{}}]*\bvoid {op}_(\w+)\(', done.stdout)))


def versions() -> str:
    """apex <-> torch <-> CUDA and ROCm: a line a wheel, then a line a torch."""
    axes, version = matrix.load(), identity.version()
    minors = [matrix.minor(release) for release in axes.torch]
    span, rows = f"{minors[0]} to {minors[-1]}", []
    for a in axes.accelerators:
        if a.pure:
            rows.append(_pure_version(a))
            continue
        names = dict.fromkeys(
            name for p in axes.packs if p.arch.vendor == a.name for name in p.toolchains[:1]
        )
        compilers = [f"{name.rpartition('-')[0]} {pins.toolchain(name).sha}" for name in names]
        pythons = ", ".join(map(matrix.dotted, axes.python))
        rows.append(
            (
                version,
                f"{a.distribution} {version}+{a.label}",
                _toolkit(a),
                span,
                pythons,
                ", ".join(compilers),
            )
        )
    wheels = table(("apex", "wheel", "for", "torch", "Python", "compilers of its packs"), rows)
    rows = [
        (
            version,
            release,
            f"`{pins.torch(release).sha[:12]}`",
            ", ".join(map(matrix.dotted, axes.python_for(release))),
        )
        for release in axes.torch
    ]
    return wheels + "\n\n" + table(("apex", "torch", "its commit", "Python"), rows)


def _pure_version(a: matrix.Accelerator) -> tuple[str, ...]:
    """The line of a wheel that is Python alone."""
    axes = matrix.load()
    minors = sorted({matrix.minor(row.torch) for row in axes.npu}, key=matrix.numbers)
    pythons = ", ".join(matrix.dotted(t) for t in axes.python if any(t in row.python for row in axes.npu))
    cann = f"CANN {axes.npu[0].cann} to {axes.npu[-1].cann}"
    wheel = f"{a.distribution} {identity.version()}+{a.label}"
    return identity.version(), wheel, cann, f"{minors[0]} to {minors[-1]}", pythons, "none: Python alone"


def _toolkit(accelerator: matrix.Accelerator) -> str:
    """CUDA 13.0 of cu130, ROCm 7.2 of rocm7.2."""
    name = {"cuda": "CUDA", "rocm": "ROCm"}.get(accelerator.name)
    return f"{name} {ask.spoken(accelerator.name, accelerator.label)}" if name else "CPU"


def tried() -> str:
    """The receipts that are kept with the sources, whatever they are of."""
    found = [r for r in receipts.load(receipts.FOLDER) if not r["narrowed"]]
    if not found:
        return "No run is recorded."
    rows = []
    for r in found:
        counts = [str(count) for count in receipts.totals(r).values()]
        of = r["wheel"]["name"] if r["wheel"] else f"source `{r['source']['compiled'][:12]}`"
        where = f"{r['cell']}, {r['card']}" if r["card"] else "CPU"
        rows.append((r["tier"], where, f"torch {r['torch']}, {matrix.dotted(r['python'])}", *counts, of))
    return table(("tier", "where", "with", "passed", "failed", "did not run", "of"), rows)


def changelog() -> str:
    """What entries of changes.toml say of this version."""
    texts = [change.text for change in changes.load() if change.version == identity.version()]
    return "\n".join(filled(f"- {text}", hanging="  ") for text in texts)


def cards() -> str:
    """On what the kept receipts are of, and what no card has run."""
    where: dict[str, list[str]] = {}
    for r in receipts.load(receipts.FOLDER):
        if not r["narrowed"]:
            place = "the CPU" if r["cell"] == receipts.CPU else f"{r['card']} ({r['cell']})"
            where.setdefault("emulated" if r["card"] == EMULATOR else place, []).append(r["cell"])
    emulated = sorted(set(where.pop("emulated", [])))
    lines = [f"Its tests ran on {' and '.join(sorted(where)) or 'nothing yet'}."]
    if emulated:
        lines.append(f"The machine code for {', '.join(emulated)} ran on an emulator.")
    if not any(cell.startswith("gfx") for cells in where.values() for cell in cells):
        lines.append("No AMD card has run any of it.")
    lines.append("Packs of other archs passed the gate on their machine code, and have run on no card.")
    return filled(" ".join(lines))


EMULATOR = "emulator"
NOTES = REPOSITORY / "release_notes" / f"{identity.version()}.md"
SECTIONS = {
    README: {"install": install, "cards": cards},
    SUPPORT: {"cards": cards, "extensions": extensions, "support": support},
    NPU: {"install": npu_install, "versions": npu_versions},
    SPEED: {"brief": speed.brief, "speed": speed.whole, "cpu": speed.of_cpu},
    NOTES: {"versions": versions, "tried": tried, "changes": changelog},
}


def render(page: Path) -> str:
    """The page's text with every generated section made anew."""
    text = page.read_text(encoding="utf-8")
    for name, section in SECTIONS[page].items():
        begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->"
        head, rest = text.split(begin, 1)
        _, tail = rest.split(end, 1)
        text = f"{head}{begin}{section()}\n{end}{tail}"
    return text


def write(page: Path) -> None:
    """Writes the page anew."""
    files.write(page, render(page))
