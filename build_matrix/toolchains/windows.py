"""What a library for Windows may need: the libraries that every Windows has, and no runtime of a compiler."""

from __future__ import annotations

from pathlib import Path

from apex._loader.pe import MACHINES, Pe
from build_matrix.errors import GateError

# Windows 10 and later have these; the C runtime of mingw-w64 is msvcrt.dll, or the universal one by parts.
SYSTEM = {"kernel32.dll", "msvcrt.dll", "ucrtbase.dll", "user32.dll", "advapi32.dll"}
UNIVERSAL_RUNTIME = "api-ms-win-crt-"


def faults(path: Path) -> list[str]:
    """Everything that keeps a library from loading on a Windows with nothing installed; empty when it fits."""
    file = Pe.read(path)
    found = (
        [] if file.machine == MACHINES["x86_64"] else [f"is for machine {file.machine:#x}, not for x86-64"]
    )
    needed = [name.lower() for name in file.imports()]
    return found + [
        f"needs {name}" for name in needed if name not in SYSTEM and not name.startswith(UNIVERSAL_RUNTIME)
    ]


def check(path: Path) -> None:
    """Raises GateError naming every fault."""
    if found := faults(path):
        raise GateError(path.name, found)
