"""Which toolchain makes the packs of an arch here: the first of the matrix's list for it that is here."""

from __future__ import annotations

from collections.abc import Callable

from build_matrix.errors import PinError, ToolchainMissing
from build_matrix.spec import matrix
from build_matrix.toolchains import Toolchain, find


def toolchain_for(arch: str) -> Toolchain:
    """The first toolchain of the matrix's list that is here. Raises the first one's ToolchainMissing or
    PinError."""
    first: Exception | None = None
    for name in matrix.load().pack(arch).toolchains:
        try:
            return find(name)
        except (ToolchainMissing, PinError) as error:
            first = first or error
    raise first


def missing(arch: str) -> str | None:
    """The toolchain that would have to come before a pack of `arch` can be built; None where one is here."""
    try:
        toolchain_for(arch)
    except (ToolchainMissing, PinError):
        return matrix.load().pack(arch).toolchains[0]
    return None


def available(archs: list[str], say: Callable[[str], None]) -> list[str]:
    """Those of `archs` whose toolchain is here; `say` is told why another is left out."""
    found = []
    for arch in archs:
        try:
            toolchain_for(arch)
            found.append(arch)
        except (ToolchainMissing, PinError) as error:
            say(f"{arch}: {error}")
    return found
