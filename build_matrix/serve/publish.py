"""What a finished plan gives: wheels, their digests, the index, and the compatibility table."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from build_matrix.check import receipts
from build_matrix.errors import BuildError
from build_matrix.farm.steps import Done, Step
from build_matrix.serve import compat, index, page
from build_matrix.spec import identity, matrix
from build_matrix.store import Store, archive, digest, files
from build_matrix.wheels import signing, wheel
from build_matrix.wheels.wheel_file import DAMAGED, WheelFile

SUMS, TABLE, CELLS, RECEIPTS = "SHA256SUMS", "compatibility.md", "compatibility.json", "receipts"
PAGE = "compatibility.html"


@dataclass(frozen=True)
class Published:
    """The wheels of a plan in dist/, and those of every index root."""

    wheels: tuple[Path, ...]
    index: dict[str, list[index.IndexedWheel]]
    passed_over: tuple[str, ...] = ()  #: what lies in dist/ and is of other projects, in words


def publish(
    done: list[Done], store: Store, dist: Path, target: Path, signer: signing.Signer | None = None
) -> Published:
    """Lays the wheels of `done` into `dist`, each by rename and signed where there is a `signer`, with SHA256SUMS, the
    compatibility table and the receipts of GPU tests, and writes the index of all wheels in `dist` to `target`. Raises
    BuildError for a file among them that this farm did not build; the new wheels lie there then."""
    folders = [(step, store.output(step.kind, step.key)) for step in done if step.kind in ("wheel", "test")]
    wheels = [wheel.publish(folder, dist) for step, folder in folders if step.kind == "wheel"]
    for path in wheels if signer else ():
        signer.sign(path)
    for step, folder in folders:
        if step.kind == "test":
            receipt = receipts.read(folder / "receipt.json")
            receipts.write(receipt, dist / RECEIPTS / receipts.name(receipt))
    by_root = finish(dist, target)
    return Published(tuple(wheels), by_root, tuple(wheel.ours(dist.iterdir())[1]))


def replaced(made: Iterable[Step], dist: Path) -> list[str]:
    """Of each wheel in `dist` whose place one of the steps' will take with fewer torches or packs: what is lost, in
    words. Wheels of one distribution, version, Python and processor have one name."""
    found = []
    for step in made:
        if step.kind == "wheel":
            accelerator, tag, torches, archs, platform = step.arguments
            of = matrix.load().accelerator(accelerator)
            tags = f"{tag}-{'none' if tag == wheel.ANY_PYTHON else tag}"
            stem = f"{of.distribution.replace('-', '_')}-{identity.version()}+{of.label}-{tags}"
            for path in wheel.namesakes(dist, stem, platform):
                if lost := _lost(path, set(torches.split()), set(archs.split())):
                    found.append(
                        f"{path} has {lost}, and one without takes its place: --dist keeps both apart"
                    )
    return found


def _lost(path: Path, torches: set[str], archs: set[str]) -> str:
    """Torches and packs of a wheel that are not among these."""
    try:
        facts = WheelFile(path).facts
        releases = [torch["release"] for torch in facts["torch"] if torch["release"] not in torches]
        packs = [arch for arch in facts["archs"] if arch not in archs]
    except (BuildError, KeyError, TypeError):
        return ""  # no wheel of ours, or of another format
    lost = [f"torch {', '.join(releases)}"] if releases else []
    return " and ".join(lost + ([f"packs {', '.join(packs)}"] if packs else []))


def finish(dist: Path, target: Path) -> dict[str, list[index.IndexedWheel]]:
    """Writes SHA256SUMS and the compatibility table of all wheels in `dist`, for people as a page too, and their index
    with that page to `target`. Returns the wheels by the root of the index. Raises BuildError for a file among them
    by the name of ours that this farm did not build, and for a `target` that may not be replaced (index.place), before
    anything is written; those of other projects are passed over."""
    index.place(target, dist)
    found, _ = wheel.ours(dist.iterdir())
    served = cells(found)
    files.write(dist / SUMS, "".join(f"{digest.of_file(path)}  {path.name}\n" for path in found))
    files.write(dist / CELLS, json.dumps(served, indent=1) + "\n")
    files.write(dist / TABLE, table(served))
    files.write(dist / PAGE, text := page.render(page.of_wheels(served)))
    return index.write(found, target, text)


def cells(wheels: list[Path]) -> list[dict]:
    """One line for each (wheel, torch): what the wheel itself says that it holds, and how far each was tried: by the
    receipts of this checkout and those that lie beside the wheel."""
    found = []
    for path in wheels:
        try:
            found += _cells(path)
        except (*DAMAGED, KeyError, TypeError, AttributeError) as error:  # or of another format
            raise BuildError(
                f"{path} is damaged, or no wheel that this farm built ({error}): move it away, and run this again"
            ) from None
    return found


def _cells(path: Path) -> list[dict]:
    with archive.wheel(path) as opened:
        facts = json.loads(opened.read("apex/build.json"))
        bindings = json.loads(opened.read("apex/lib/bindings.json"))
    folders = (receipts.FOLDER, receipts.LOCAL, path.parent / RECEIPTS)
    accelerator = matrix.load().accelerator(facts["accelerator"])
    if accelerator.pure:
        return compat.pure_cells(accelerator, path.name)
    known = receipts.counting(identity.wheel(path), [digest.of_file(path)], folders)
    platform = matrix.platform_of(path.stem.rpartition("-")[2])
    if matrix.load().platform(platform).windows:
        bindings = compat.portable_entries(platform, facts["source_sha256"])
    found = []
    for entry in bindings:
        of = entry["torch"], entry["python"], known
        found.append(
            {
                "wheel": path.name,
                "accelerator": facts["accelerator"],
                "local": facts["local"],
                "platform": platform,
                "torch": entry["torch"],
                "python": entry["python"],
                "binding": receipts.grade(receipts.CPU, *of, entry["grade"], platform),
                "packs": {arch: receipts.grade(arch, *of, "built", platform) for arch in facts["archs"]},
            }
        )
    return found


def table(served: list[dict]) -> str:
    """Markdown: one row for the CPU of each wheel and one a pack, on each platform, one column a torch; the grade, and
    the Pythons whose wheels lack that torch."""
    minors = sorted({cell["torch"] for cell in served}, key=matrix.numbers)
    lines = [
        "| pack | wheel | " + " | ".join(f"torch {m}" for m in minors) + " |",
        "|---" * (2 + len(minors)) + "|",
    ]
    of = sorted(
        {(cell["platform"] != matrix.NATIVE, cell["platform"], cell["accelerator"]) for cell in served}
    )
    for foreign, platform, accelerator in of:
        own = [c for c in served if (c["platform"], c["accelerator"]) == (platform, accelerator)]
        on = f", {platform}" if foreign else ""
        of_cpu = [] if matrix.load().accelerator(accelerator).pure else [receipts.CPU]
        for arch in [*of_cpu, *dict.fromkeys(arch for cell in own for arch in cell["packs"])]:
            texts = [_text(arch, own, minor) for minor in minors]
            lines.append(f"| {arch} | apex-{accelerator}{on} | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"


def _text(arch: str, own: list[dict], minor: str) -> str:
    """The best grade of an arch (or the CPU) among the wheels of one accelerator and platform, with a torch."""
    holding = [cell for cell in own if arch == receipts.CPU or arch in cell["packs"]]
    grades = {
        cell["python"]: cell["packs"].get(arch, cell["binding"]) for cell in holding if cell["torch"] == minor
    }
    if not grades:
        return "–"
    lacking = sorted({cell["python"] for cell in holding} - set(grades))
    return receipts.best(grades) + (f" (not {', '.join(lacking)})" if lacking else "")
