"""Runs a tier of the tests in a cell, as installed or in this checkout, and writes its receipt and JUnit files.

L0: every op and optimizer against its reference. L1: amp's cross product and the examples. emulated: the packs' AMD
machine code on the emulator. A cell is the CPU, or an arch whose card is here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from build_matrix import REPOSITORY
from build_matrix.check import receipts
from build_matrix.errors import BuildError
from build_matrix.parts import tree
from build_matrix.spec import identity, matrix
from build_matrix.store import files
from build_matrix.wheels.wheel_file import WheelFile

TESTS = REPOSITORY / "tests"
NOTHING_SELECTED = 5  # pytest's exit code
KEPT = ("APEX_ROCM_ROOT", "APEX_AMD_EMULATOR", "APEX_NVCC", "APEX_STORE", receipts.KEY)


@dataclass(frozen=True)
class Part:
    """One run of pytest: a folder of tests/, without some of its own."""

    folder: str
    without: tuple[str, ...] = ()
    marker: str = ""
    of_wheels: bool = True  #: runs where only the wheel and tests/ are, too
    alone: bool = False  #: not beside other tests in one process

    @property
    def name(self) -> str:
        """L0-loader: as its JUnit file is called."""
        return "-".join(filter(None, [*self.folder.split("/"), self.marker]))


PARTS = {
    receipts.L0: (
        Part("L0", ("L0/host", "L0/loader")),
        Part("L0/loader", of_wheels=False),
        Part("L0/host", of_wheels=False, alone=True),
    ),
    receipts.L1: (Part("L1", of_wheels=False), Part("L1/amp", marker="full_cross", of_wheels=False)),
    receipts.EMULATED: (
        Part("emulated", marker="emulated", of_wheels=False),
        Part("simt", marker="emulated", of_wheels=False),
    ),
}


class NotHere(BuildError):
    """This machine is not the cell; nothing ran."""

    exit_code = 3


@dataclass(frozen=True)
class Site:
    """Where apex is imported from, and where the tests lie. `wheel` is None for the checkout."""

    path: Path
    tests: Path
    wheel: Path | None = None

    def environment(self, cell: str) -> dict[str, str]:
        """The variables of the tests: this process's, without apex's own but for KEPT; the CPU's see no card."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith("APEX_") or k in KEPT}
        hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""} if cell == receipts.CPU else {}
        paths = [str(self.path), *([str(self.tests)] if self.wheel else [])]
        return clean | hidden | {"PYTHONPATH": os.pathsep.join(paths)}

    def source(self) -> identity.Source:
        """What is tested, as receipts are bound by it."""
        return identity.wheel(self.wheel) if self.wheel else identity.checkout()

    def pack(self, cell: str) -> str | None:
        """The digest of the cell's pack, or None where there is none."""
        if self.wheel:
            manifest = WheelFile(self.wheel).packs.get(cell)
            return identity.pack(manifest) if manifest else None
        path = tree.DEFAULT / "apex/packs" / cell / "manifest.json"
        return identity.pack(json.loads(path.read_text())) if path.is_file() else None


def here(tier: str, cell: str) -> None:
    """Raises NotHere where the cell's card is not on this machine."""
    _check(tier, cell, _probe(Site(REPOSITORY, TESTS), cell))


def run(
    tier: str,
    cell: str,
    out: Path,
    wheel: Path | None = None,
    jobs: int | None = None,
    expression: str = "",
) -> list[Path]:
    """Runs it and writes, into `out`, JUnit files and the receipts: one, or of the emulated tier one an arch.
    `expression` narrows the tests as pytest's -k does; such a receipt says so, and counts for nothing.

    Raises NotHere where the cell's card is not, NothingRan where no test ran, ReceiptError where a JUnit file is cut.
    """
    here(tier, cell)
    out = out.absolute()  # pytest runs in another folder than this
    out.mkdir(parents=True, exist_ok=True)
    archs = [p.arch.name for p in matrix.load().packs if p.emulated] if tier == receipts.EMULATED else [cell]
    with _site(wheel, archs) as site:
        probe, files = _probe(site, cell), []
        for part in PARTS[tier]:
            file = out / f"{tier}-{cell}-{part.name}.xml"
            if (part.of_wheels or not wheel) and _pytest(site, cell, part, file, jobs, expression):
                files.append(file)
        made = [
            receipts.make(tier, arch, probe, files, site.source(), wheel, site.pack(arch), expression)
            for arch in archs
        ]
    return [receipts.write(receipt, out / receipts.name(receipt)) for receipt in made]


@contextlib.contextmanager
def _site(wheel: Path | None, archs: list[str]) -> Iterator[Site]:
    """The checkout, or a folder into which the wheel is installed. Raises BuildError where build/tree is of other
    sources, with the command that builds it for `archs`, or where the wheel is none or pip refuses it."""
    if wheel is None:
        facts = tree.DEFAULT / "apex/build.json"
        if not facts.is_file() or json.loads(facts.read_text())["source_sha256"] != identity.compiled():
            options = "".join(f" --arch={arch}" for arch in archs if arch != receipts.CPU)
            raise BuildError(
                f"build/tree is not of these sources. Run: python -m build_matrix tree --available{options}"
            )
        yield Site(REPOSITORY, TESTS)
        return
    WheelFile(wheel)  # says what is wrong with it
    with files.temporary("tier") as place:
        options = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--target", str(place / "site")]
        done = subprocess.run(
            [sys.executable, "-m", "pip", "install", *options, str(wheel)], capture_output=True, text=True
        )
        if done.returncode:
            raise BuildError(f"{wheel.name} cannot be installed here:\n{done.stderr.strip()}")
        shutil.copytree(TESTS, place / "tests")
        shutil.copyfile(REPOSITORY / "pyproject.toml", place / "pyproject.toml")  # the tests' markers
        yield Site(place / "site", place / "tests", wheel)


def _probe(site: Site, cell: str) -> dict:
    """What `python -m apex --json` says, in the environment of the tests."""
    done = subprocess.run(
        [sys.executable, "-m", "apex", "--json"],
        cwd=site.tests.parent,
        env=site.environment(cell),
        capture_output=True,
        text=True,
    )
    try:
        return json.loads(done.stdout)
    except ValueError:
        raise BuildError(f"python -m apex does not say what is here:\n{done.stderr.strip()}") from None


def _check(tier: str, cell: str, probe: dict) -> None:
    if probe["machine"]["torch"] is None:
        raise NotHere(f"{tier}({cell}): no torch is installed; nothing ran")
    if cell == receipts.CPU:
        return
    if cell not in (known := matrix.load().cells()):
        raise BuildError(f"{cell} is no cell; there are {', '.join(known)}")
    there = [device["arch"] for device in probe["machine"]["devices"] if device["platform"] != "cpu"]
    if cell not in there:
        raise NotHere(f"{tier}({cell}): no such card is here ({', '.join(there) or 'no GPU'}); nothing ran")


def _pytest(site: Site, cell: str, part: Part, file: Path, jobs: int | None, expression: str) -> bool:
    """Whether any test was selected."""
    file.unlink(missing_ok=True)
    chosen = [part.marker] if part.marker else []
    chosen.append("not gpu" if cell == receipts.CPU else "gpu")
    options = ["-m", " and ".join(chosen), *(["-k", expression] if expression else [])]
    options += [f"--ignore={site.tests / name}" for name in part.without]
    if importlib.util.find_spec("xdist") and not part.alone:
        options += ["-n", str(jobs or "auto"), "--dist", "loadfile"]
    command = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={file}",
        *options,
        site.tests / part.folder,
    ]
    done = subprocess.run([sys.executable, *command], cwd=site.tests.parent, env=site.environment(cell))
    if done.returncode not in (0, 1, NOTHING_SELECTED):
        raise BuildError(f"pytest broke off ({done.returncode}); nothing is written down")
    return done.returncode != NOTHING_SELECTED
