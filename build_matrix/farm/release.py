"""What a finished plan gives: wheels, their digests, the index, and the compatibility table."""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path

from build_matrix import digest, index, matrix, receipts, wheel
from build_matrix.farm.steps import Done
from build_matrix.store import Store

SUMS, TABLE, CELLS, RECEIPTS = "SHA256SUMS", "compatibility.md", "compatibility.json", "receipts"


@dataclass(frozen=True)
class Release:
    wheels: tuple[Path, ...]
    index: dict[str, list[index.IndexedWheel]]


def publish(done: list[Done], store: Store, dist: Path, target: Path) -> Release:
    """Lays the wheels of `done` into `dist`, each by rename, with SHA256SUMS, the compatibility table and the
    receipts of GPU tests, and writes the index of all wheels in `dist` to `target`."""
    folders = [(step, store.output(step.kind, step.key)) for step in done if step.kind in ("wheel", "test")]
    wheels = [wheel.publish(folder, dist) for step, folder in folders if step.kind == "wheel"]
    for step, folder in folders:
        if step.kind == "test":
            (dist / RECEIPTS).mkdir(exist_ok=True)
            _write(
                dist / RECEIPTS / f"{step.name.replace(' ', '-')}.json", (folder / "receipt.json").read_text()
            )
    found = sorted(dist.glob("*.whl"))
    _write(dist / SUMS, "".join(f"{digest.of_file(path)}  {path.name}\n" for path in found))
    served = cells(found)
    _write(dist / CELLS, json.dumps(served, indent=1) + "\n")
    _write(dist / TABLE, table(served))
    return Release(tuple(wheels), index.write(found, target))


def cells(wheels: list[Path]) -> list[dict]:
    """One line for each (wheel, torch): what the wheel itself says that it holds, and how far each was tried."""
    known, found = receipts.load(), []
    for path in wheels:
        with zipfile.ZipFile(path) as archive:
            facts = json.loads(archive.read("apex/build.json"))
            bindings = json.loads(archive.read("apex/lib/bindings.json"))
        for entry in bindings:
            grades = {
                arch: receipts.grade(arch, entry["torch"], matrix.load().pack(arch).emulated, known)
                for arch in facts["archs"]
            }
            found.append(
                {
                    "wheel": path.name,
                    "accelerator": facts["accelerator"],
                    "local": facts["local"],
                    "torch": entry["torch"],
                    "python": entry["python"],
                    "binding": entry["grade"],
                    "packs": grades,
                }
            )
    return found


def table(served: list[dict]) -> str:
    """Markdown: one row a pack, one column a torch; the grade, and the Pythons whose wheels lack that torch."""
    minors = sorted({cell["torch"] for cell in served}, key=matrix.numbers)
    rows = list(dict.fromkeys((arch, cell["accelerator"]) for cell in served for arch in cell["packs"]))
    lines = [
        "| pack | wheel | " + " | ".join(f"torch {m}" for m in minors) + " |",
        "|---" * (2 + len(minors)) + "|",
    ]
    for arch, accelerator in rows:
        own = [cell for cell in served if cell["accelerator"] == accelerator and arch in cell["packs"]]
        every = {cell["python"] for cell in own}
        texts = []
        for minor in minors:
            having = [cell for cell in own if cell["torch"] == minor]
            lacking = sorted(every - {cell["python"] for cell in having})
            grade = having[0]["packs"][arch] if having else "–"
            texts.append(f"{grade} (not {', '.join(lacking)})" if having and lacking else grade)
        lines.append(f"| {arch} | apex-{accelerator} | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
