"""Tests of a wheel on a worker that has a card: a unit like any other, whose output is the receipt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from build_matrix import REPOSITORY
from build_matrix.errors import GateError
from build_matrix.store import Store, WorkUnit, digest
from build_matrix.toolchains import headers, pythons

CHECK = REPOSITORY / "ci/gpu_check.py"
SOURCES = ("ci/gpu_check.py", "ci/gpu_check_results.py", "tests/L0")


def unit(store: Store, arch: str, wheel: str) -> WorkUnit:
    """Tries the wheel whose key in the store is `wheel` with the torch of this worker."""

    def make(folder: Path) -> None:
        (path,) = store.output("wheel", wheel).glob("*.whl")
        command = [sys.executable, str(CHECK), str(path), "--out", str(folder), "--benchmarks"]
        done = subprocess.run(command, encoding="utf-8", errors="replace", capture_output=True)
        if done.returncode:
            raise GateError(f"{path.name} on {arch}", (done.stdout + done.stderr).splitlines()[-20:])

    files = [path for name in SOURCES for path in _files(REPOSITORY / name)]
    inputs = {
        "wheel": wheel,
        "torch": headers.installed_version(),
        "tests": {str(path.relative_to(REPOSITORY)): digest.of_file(path) for path in files},
    }
    return WorkUnit("test", f"{arch} {pythons.own_tag()}", inputs, make)


def _files(place: Path) -> list[Path]:
    return [place] if place.is_file() else sorted(place.rglob("*.py"))
