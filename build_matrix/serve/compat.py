"""What this checkout knows of the cells of the matrix besides which wheel serves them (`apex._loader.offers`): their
grades, by receipts. `compat` and the tables of the docs."""

from __future__ import annotations

import sys

from apex._loader import ask, npu
from apex._loader.release import Accelerator
from build_matrix.check import receipts
from build_matrix.parts import loads, releases
from build_matrix.spec import identity, matrix

NOT_THERE = ask.NOT_THERE  # exit code


def main(arguments: list[str]) -> int:
    """The command. Returns the exit code."""
    if "--table" in arguments:
        if len(arguments) > 1:
            sys.stderr.write(
                "build_matrix compat: --table prints Markdown of all cells, and takes nothing beside it; programs ask "
                "compat --json, with --torch and --arch\n"
            )
            return ask.SENSELESS
        sys.stdout.write(table())
        return 0
    return ask.compat(arguments, "python -m build_matrix compat", known)


def answer(question: dict) -> dict:
    """What `compat --json` prints: ask.answer, with the grades of this checkout. Raises ValueError."""
    found = ask.answer(question)
    return found | known(question, found)


def known(question: dict, found: dict) -> dict:
    """The grades of what was found: `grades` of its packs (or the CPU), `binding_grades` as a wheel knows them too."""
    if not found["found"]:
        return {}
    of_bindings: dict[str, str] = {}
    if matrix.load().accelerator(found["distribution"].removeprefix("apex-")).pure:
        return {"grades": {npu.NAME: receipts.NO_CODE}, "binding_grades": of_bindings}
    if found["binding"] == "exact":
        minor, tags = matrix.minor(found["torch"]), found["pythons"]
        rows = {row["python"]: row["grade"] for row in releases.grades() if row["torch"] == minor}
        of_bindings = {tag: rows[tag] for tag in tags if tag in rows}
    packs = [pack["runs"] for pack in found["packs"]]
    archs = packs or matrix.load().archs(found["distribution"].removeprefix("apex-"))
    cells = [arch for arch in archs if arch not in ("jit", "reference")] or [receipts.CPU]
    of_cells = grades(cells, found["torch"], found["pythons"], found["platform"])
    return {"grades": of_cells, "binding_grades": of_bindings}


def grades(cells: list[str], release: str, tags: list[str], platform: str = matrix.NATIVE) -> dict[str, str]:
    """The best that receipts which count for this checkout say of archs (or the CPU) with a release of torch."""
    known = receipts.counting(identity.checkout())
    minor = matrix.minor(release)
    return {
        cell: receipts.best(
            {
                tag: receipts.grade(cell, minor, tag, known, _base(cell, release, tag, platform), platform)
                for tag in tags
            }
        )
        for cell in cells
    }


def _base(cell: str, release: str, tag: str, platform: str) -> str:
    """What is known without a run of the tests."""
    if cell != receipts.CPU:
        return "built"
    if loads.library_path(platform).is_file():
        from build_matrix.parts import host_library  # reads every source of the library

        return loads.library_grade(platform, host_library.source_identity(platform)) or loads.NEVER
    linked = "linked" if platform == matrix.NATIVE else loads.NEVER
    if not loads.path(release, tag, platform=platform).is_file():
        return linked
    from build_matrix.parts import bindings  # reads every source of the bindings

    return loads.grade(release, tag, bindings.source_identity(), platform=platform) or linked


def portable_entries(platform: str, source: str) -> list[dict[str, str]]:
    """In the place of bindings.json, of a wheel that holds no compiled binding, of sources with the digest `source`: a
    line for each torch and Python that the release is for, with how far its library was tried."""
    axes = matrix.load()
    of = [(torch, tag) for torch in axes.torch for tag in axes.python_for(torch)]
    known = source == identity.compiled()
    grade = _base(receipts.CPU, "", "", platform) if known else loads.NEVER
    return [{"torch": matrix.minor(torch), "python": tag, "grade": grade} for torch, tag in of]


def pure_cells(accelerator: Accelerator, name: str) -> list[dict]:
    """publish.cells of a wheel that is Python alone: a line for each torch and Python that a torch_npu
    is for, on every platform."""
    axes = matrix.load()
    of = {
        (matrix.minor(row.torch), tag): None for row in axes.npu for tag in row.python if tag in axes.python
    }
    return [
        {
            "wheel": name,
            "accelerator": accelerator.name,
            "local": accelerator.label,
            "platform": platform.name,
            "torch": torch,
            "python": tag,
            "binding": receipts.NO_CODE,
            "packs": {accelerator.name: receipts.NO_CODE},
        }
        for platform in axes.platforms
        for torch, tag in of
        if accelerator.name in platform.accelerators
    ]


def table() -> str:
    """The support table of README and release notes, as Markdown: one row an arch, one column a torch. On platforms of
    a cross compiler the archs of which the same is known share a row."""
    axes = matrix.load()
    minors = [matrix.minor(v) for v in axes.torch]
    rows = {receipts.CPU: "every wheel"} | {p.arch.name: f"apex-{p.arch.vendor}" for p in axes.packs}
    found = [grades(list(rows), release, axes.python_for(release)) for release in axes.torch]
    lines = [
        "| pack | wheel | " + " | ".join(f"torch {m}" for m in minors) + " |",
        "|---" * (2 + len(minors)) + "|",
    ]
    for cell, wheel in rows.items():
        lines.append(f"| {cell} | {wheel} | " + " | ".join(column[cell] for column in found) + " |")
    for platform in axes.platforms:
        if platform.name != matrix.NATIVE:
            lines += _foreign_rows(platform)
    for a in axes.accelerators:
        if a.pure:
            lines.append(f"| {a.name} | {a.distribution} | " + " | ".join(map(_of_npu, minors)) + " |")
    return "\n".join(lines) + "\n"


def _of_npu(minor: str) -> str:
    """Where a torch_npu is known for a torch, the reference serves; no card ran it."""
    return receipts.NO_CODE if any(matrix.minor(row.torch) == minor for row in matrix.load().npu) else "–"


def _foreign_rows(platform: matrix.Platform) -> list[str]:
    axes = matrix.load()
    wheels = {receipts.CPU: "every wheel"} | {
        p.arch.name: f"apex-{p.arch.vendor}" for p in axes.packs if p.arch.vendor in platform.accelerators
    }
    found = [grades(list(wheels), t, axes.python_for(t), platform.name) for t in axes.torch]
    rows: dict[tuple, list[str]] = {}
    for cell, wheel in wheels.items():
        rows.setdefault((wheel, *(column[cell] for column in found)), []).append(cell)
    return [
        f"| {', '.join(cells)} on {platform.name} | " + " | ".join(texts) + " |"
        for texts, cells in rows.items()
    ]
