"""Brings a toolchain here: from the package index by pip's own configuration, or by the chroot script of
ci/."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from build_matrix import REPOSITORY, pins
from build_matrix.errors import BuildError
from build_matrix.toolchains.base import provisioned_root


def command(name: str, target: Path) -> list[str]:
    """The command that brings toolchain `name` into `target`."""
    if name.startswith("clang-hip"):
        return ["bash", str(REPOSITORY / "ci/provision_rocm_toolchain.sh"), str(target)]
    packages = pins.packages(name)
    if not packages:
        known = ", ".join(p.component for p in pins.load() if p.project == "toolchain")
        raise BuildError(f"no toolchain is called {name}; related_commits knows {known}")
    return [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(target),
        *packages,
    ]


def target(name: str) -> Path:
    """The folder of a provisioned toolchain."""
    return provisioned_root() / ("rocm" if name.startswith("clang-hip") else name)


def provision(name: str) -> Path:
    """Runs it; the folder appears under its own name only when it is complete. Returns the folder."""
    place = target(name)
    if place.is_dir():
        return place
    partial = place.with_name(f".partial-{place.name}")
    shutil.rmtree(partial, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    direct = name.startswith("clang-hip")  # the script renames by itself
    subprocess.run(command(name, place if direct else partial), check=True)
    if not direct:
        for program in partial.glob("nvidia/*/*/*"):
            if program.is_file() and program.parent.name == "bin":
                program.chmod(0o755)  # wheels unpacked with --target may lose it
        for program in partial.glob("nvidia/*/nvvm/bin/*"):
            program.chmod(0o755)
        partial.rename(place)
    return place
