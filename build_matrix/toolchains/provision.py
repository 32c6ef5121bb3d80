"""Brings a toolchain here: from the package index by pip's own configuration, by the chroot script of ci/, or, a
cross compiler, by apt-get."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from build_matrix import REPOSITORY
from build_matrix.errors import BuildError, PackageIndexError, PinError, ToolchainMissing
from build_matrix.spec import matrix, pins
from build_matrix.store import files
from build_matrix.toolchains import find, package_index
from build_matrix.toolchains.base import provisioned_root


def command(name: str, target: Path) -> list[str]:
    """The command that brings toolchain `name` into `target`."""
    if name.startswith("clang-hip"):
        return ["bash", str(REPOSITORY / "ci/provision_rocm_toolchain.sh"), str(target)]
    if package := _cross(name):
        return ["apt-get", "install", "--yes", "--no-install-recommends", package]
    packages = pins.packages(name)
    if not packages:
        known = ", ".join(p.component for p in pins.load() if p.project == "toolchain")
        known += "".join(f", {p.toolchain}" for p in matrix.load().platforms if p.toolchain)
        raise BuildError(f"no toolchain is called {name}; related_commits and matrix.toml know {known}")
    return [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(target),
        "--require-hashes",
        "--requirement",
        str(_requirements(target)),
    ]


def _requirements(target: Path) -> Path:
    """The file that names the packages with the digests of related_commits, while pip runs."""
    return target.with_name(f"{target.name}.requirements.txt")


def why_not(name: str) -> str:
    """The command of somebody who can bring a toolchain, where this user cannot; empty where it can be brought."""
    if not name.startswith("clang-hip") or (os.geteuid() == 0 and shutil.which("apt-get")):
        return ""
    if shutil.which("apt-get"):
        return f"sudo {sys.executable} -m nox -s toolchain -- {name}"
    return f"nox -s toolchain -- {name}, as root with debootstrap; or name one by APEX_ROCM_ROOT or ROCM_PATH"


def size(name: str) -> str:
    """How large what comes is, in words."""
    if name.startswith("clang-hip"):
        return "a Debian chroot of 1 GB by debootstrap, some minutes"
    wanted, total = dict(line.split("==") for line in pins.packages(name)), 0
    try:
        for project, rest in wanted.items():
            sha256 = rest.partition("sha256:")[2]
            total += sum(
                package_index.size(f.url) for f in package_index.files(project) if f.sha256 == sha256
            )
    except PackageIndexError:
        total = 0  # pip will say why
    listed = ", ".join(wanted)
    return f"{listed}, {total / 1e6:.0f} MB" if total else listed


def words(name: str) -> str:
    """What brings a toolchain, for people."""
    packages = [line.partition(" --hash")[0] for line in pins.packages(name)]
    return f"pip install {' '.join(packages)}" if packages else " ".join(command(name, target(name)))


def _cross(name: str) -> str | None:
    """The Debian package of a cross compiler; None for other toolchains."""
    return next((p.package for p in matrix.load().platforms if p.toolchain == name), None)


def target(name: str) -> Path:
    """The folder of a provisioned toolchain."""
    return provisioned_root() / ("rocm" if name.startswith("clang-hip") else name)


def provision(name: str) -> None:
    """Runs it, unless the pinned version is here; the folder appears under its own name only when it is complete, in
    place of one with another version. Raises BuildError where apt-get cannot install a cross compiler, or a chroot of
    another version is there, PackageIndexError where the command fails: no index answers, a download is cut, its hash
    is not the one that related_commits pins."""
    if _cross(name):
        _install(command(name, target(name)))
        return
    place = target(name)
    direct = name.startswith("clang-hip")  # the script renames by itself
    if place.is_dir():
        if _pinned(name):
            return
        if direct:  # a chroot, in which something may be mounted
            raise BuildError(f"{place} does not hold the pinned {name}: remove it, and run this again")
    place.parent.mkdir(parents=True, exist_ok=True)
    if direct:
        _run(name, command(name, place))
        return
    with files.temporary(place.name, place.parent) as folder:  # two may bring it at once
        partial = folder / place.name
        wanted = command(name, partial)
        _requirements(partial).write_text("\n".join(pins.packages(name)) + "\n", encoding="utf-8")
        _run(name, wanted)
        for program in partial.glob("nvidia/*/*/*"):
            if program.is_file() and program.parent.name == "bin":
                program.chmod(0o755)  # wheels unpacked with --target may lose it
        for program in partial.glob("nvidia/*/nvvm/bin/*"):
            program.chmod(0o755)
        if place.is_dir() and _pinned(name):
            return  # the other one was first, and may be compiling with it
        shutil.rmtree(place, ignore_errors=True)
        partial.rename(place)


def _run(name: str, wanted: list[str]) -> None:
    if code := subprocess.run(wanted).returncode:
        raise PackageIndexError(f"{name} did not come: {words(name)} ended with {code}; it says why above")


def _pinned(name: str) -> bool:
    """Whether the toolchain is here as related_commits pins it."""
    try:
        find(name)
    except (PinError, ToolchainMissing):
        return False
    return True


def _install(command: list[str]) -> None:
    """By the machine's package manager, which wants root; without it the command is named."""
    try:
        done = subprocess.run(command)
    except OSError as error:
        raise BuildError(f"{command[0]} does not run here: {error.strerror}; install {command[-1]}") from None
    if done.returncode:
        raise BuildError(f"apt-get did not install it. Run as root: {' '.join(command)}")
