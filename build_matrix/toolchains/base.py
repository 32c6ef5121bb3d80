"""What every device compiler offers."""

from __future__ import annotations

import subprocess
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

from build_matrix import REPOSITORY
from build_matrix.errors import CompileError
from build_matrix.spec.archs import Arch


def provisioned_root() -> Path:
    """Where provisioned toolchains lie: outside build/, since `make clean` must not cost a download."""
    return REPOSITORY / ".toolchains"


@dataclass(frozen=True)
class Compiled:
    """A code object, per kernel the spilled bytes that the compiler reported (empty when it reports none), and the
    files that it says it read (none where it reads but the sources)."""

    image: bytes
    spills: dict[str, int] = field(default_factory=dict)
    read: tuple[str, ...] = ()


class Toolchain(ABC):
    """A compiler that is here."""

    name: str  #: nvcc, nvrtc, clang-hip
    version: str  #: its own full version
    vendor: str  #: cuda or rocm

    @property
    @abstractmethod
    def digest(self) -> str:
        """SHA-256 over the binaries that decide what it emits."""

    def knows(self, arch: Arch) -> bool:
        """Whether it can compile for `arch`."""
        return arch.vendor == self.vendor and (not self.archs or arch.name in self.archs)

    @property
    def headers(self) -> Path | None:
        """The folder of its own headers, where it reads any beside the sources."""
        return None

    @property
    def archs(self) -> list[str]:
        """Every arch it says it knows; empty when it does not say."""
        return []

    @abstractmethod
    def flags(self, arch: Arch) -> list[str]:
        """The flags of a release pack; they go into the manifest."""

    @abstractmethod
    def compile(self, source: Path, arch: Arch) -> Compiled:
        """Compiles one device source; headers lie beside it. Raises CompileError with the compiler's
        words."""

    def describe(self) -> dict[str, str]:
        """As the manifest says it."""
        return {"name": self.name, "version": self.version, "sha256": self.digest}


def run(what: str, command: list[str], cwd: Path | None = None) -> str:
    """Runs a compiler and returns its standard error; raises CompileError when it fails."""
    result = subprocess.run(command, cwd=cwd, encoding="utf-8", errors="replace", capture_output=True)
    if result.returncode:
        raise CompileError(what, command, result.stderr or result.stdout)
    return result.stderr
