"""Finds a toolchain by its name in matrix.toml, or says how to get it."""

from __future__ import annotations

import subprocess
from functools import cache

from build_matrix.errors import PinError, ToolchainMissing
from build_matrix.spec import pins
from build_matrix.toolchains import nvcc, nvrtc, rocm
from build_matrix.toolchains.base import Toolchain


def _of_compiler(compiler: str) -> list[Toolchain]:
    found: list[Toolchain] = []
    for make, places in (
        (nvcc.Nvcc, [(path,) for path in nvcc.candidates()] if compiler == "nvcc" else []),
        (nvrtc.Nvrtc, nvrtc.candidates() if compiler == "nvrtc" else []),
        (rocm.ClangHip, rocm.candidates() if compiler == "clang-hip" else []),
    ):
        for place in places:
            try:
                found.append(make(*place))
            except (OSError, ValueError, subprocess.SubprocessError):
                continue  # a program that does not run is no toolchain; the next candidate may
    return found


@cache
def find(name: str, pinned: bool = True) -> Toolchain:
    """The toolchain `<compiler>-<series>`, for example `nvcc-13.0`.

    A series matches every version that begins with it. With `pinned`, the exact version of related_commits is
    wanted: raises PinError when only others of the series are here. Raises ToolchainMissing when none is.
    """
    compiler, _, series = name.rpartition("-")
    matching = [
        t for t in _of_compiler(compiler) if t.version == series or t.version.startswith(f"{series}.")
    ]
    if not matching:
        raise ToolchainMissing(name, f"nox -s toolchain -- {name}")
    pin = pins.toolchain(name)
    if not pinned or pin is None:
        return matching[0]
    for toolchain in matching:
        if toolchain.version == pin.sha:
            return toolchain
    remedy = f"nox -s toolchain -- {name}"
    raise PinError(name, pin.sha, matching[0].version, verifiable=False, remedy=remedy)


def of_vendor(vendor: str) -> list[Toolchain]:
    """Every toolchain of this machine for cuda or rocm, whatever its version: what a source install uses."""
    compilers = ["nvcc", "nvrtc"] if vendor == "cuda" else ["clang-hip"]
    return [toolchain for compiler in compilers for toolchain in _of_compiler(compiler)]


def available(names: list[str]) -> dict[str, Toolchain | ToolchainMissing | PinError]:
    """Each name with its toolchain, or with the reason why it is not to be had."""
    found: dict[str, Toolchain | ToolchainMissing | PinError] = {}
    for name in names:
        try:
            found[name] = find(name)
        except (ToolchainMissing, PinError) as error:
            found[name] = error
    return found
