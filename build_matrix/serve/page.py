"""The compatibility table as a page: one HTML file, filtered in the browser by its own script. It asks no server and
no other file, so that it works from a disk, in the documentation and from the root of an index."""

from __future__ import annotations

import json
from pathlib import Path

from build_matrix.check import receipts
from build_matrix.serve import compat
from build_matrix.spec import identity, matrix
from build_matrix.store import files

COLUMNS = ("torch", "accelerator", "arch", "python", "platform")  # that the page filters by
TEMPLATE = Path(__file__).with_name("page.html")


def of_checkout() -> list[dict[str, object]]:
    """A row for each torch, platform and arch (or the CPU) of the matrix, with the Pythons it is for."""
    axes, rows = matrix.load(), []
    for platform in axes.platforms:
        for torch in axes.torch:
            tags = axes.python_for(torch)
            compiled = [a for a in axes.accelerators if not a.pure]
            archs = {a.name: axes.archs(a.name) or [receipts.CPU] for a in compiled}
            for accelerator in [a for a in compiled if a.name in platform.accelerators]:
                grades = compat.grades(archs[accelerator.name], torch, tags, platform.name)
                rows += [
                    _row(accelerator, matrix.minor(torch), arch, tags, platform.name, grade)
                    for arch, grade in grades.items()
                ]
    return rows + of_wheels([cell for a in axes.accelerators if a.pure for cell in compat.pure_cells(a, "")])


def of_wheels(cells: list[dict]) -> list[dict[str, object]]:
    """The same of what wheels hold: publish.cells."""
    axes, found = matrix.load(), {}
    for cell in cells:
        packs = cell["packs"] or {receipts.CPU: cell["binding"]}
        for arch, grade in packs.items():
            key = (cell["accelerator"], cell["torch"], arch, cell["platform"])
            found.setdefault(key, {})[cell["python"]] = grade
    return [
        _row(axes.accelerator(name), torch, arch, sorted(grades), platform, receipts.best(grades))
        for (name, torch, arch, platform), grades in found.items()
    ]


def _row(accelerator, torch, arch, tags, platform, grade) -> dict[str, object]:
    version = f"{identity.version()}+{accelerator.label}"
    return {
        "torch": torch,
        "accelerator": accelerator.name,
        "arch": arch,
        "python": [matrix.dotted(tag) for tag in tags],
        "platform": platform,
        "wheel": f"{accelerator.distribution}=={version}",
        "root": f"whl/{accelerator.roots[0]}/",
        "grade": grade,
    }


def render(rows: list[dict[str, object]]) -> str:
    """The page's text."""
    data = json.dumps(rows, separators=(",", ":")).replace("<", "\\u003c")  # no </script> inside
    about = {"@VERSION@": identity.version(), "@INDEX@": json.dumps(matrix.load().index), "@ROWS@": data}
    text = TEMPLATE.read_text(encoding="utf-8")
    for mark, value in about.items():
        text = text.replace(mark, value)
    return text


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """Writes the page, in whole."""
    files.write(path, render(rows))
