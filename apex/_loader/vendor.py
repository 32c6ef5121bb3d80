"""The vendor's library that belongs to torch, by one rule for all of them.

1. A copy that this process has mapped already. Two copies: the one torch's libraries name.
2. The one that torch's libraries name as NEEDED, in the folders they would search.
3. That same versioned name by the dynamic linker, as torch itself would get it.
Never an unversioned name, never /opt/rocm or /usr/local/cuda first: a second runtime in one process does not
know torch's streams.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from apex._loader import elf, mapped, system


@dataclass(frozen=True)
class Found:
    """Path or versioned name of a library, or None with the reason."""

    path: str | None
    reason: str
    is_mapped: bool = False


def torch_folder() -> Path | None:
    """Folder of torch's shared libraries without importing torch, or None."""
    module = sys.modules.get("torch")
    if file := getattr(module, "__file__", None):
        return Path(file).parent / "lib"
    import importlib.util

    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent / "lib" if spec and spec.origin else None


def find(stem: str, folder: Path | None = None) -> Found:
    """The library whose soname begins with `stem` ("libnvrtc.so"), a Found.

    folder: of torch's libraries; by default the installed torch's.
    """
    folder = Path(folder) if folder else torch_folder()
    named = _needed(stem, folder) if folder else None
    copies = mapped.find(stem)
    if copies:
        ours = os.path.realpath(named) if named else None
        path = ours if ours in copies else copies[0]
        return Found(path, "mapped in this process", True)
    if named:
        return Found(named, "named by torch's libraries")
    where = f"the torch libraries in {folder} name none" if folder else "torch is not installed"
    return Found(None, f"no {stem} is mapped, and {where}")


def _needed(stem: str, folder: Path) -> str | None:
    """Path, or failing that the versioned soname, of what the libraries in `folder` need; on Windows, which keeps no
    such names, of what lies beside them."""
    if system.on_windows():
        return next((str(p) for p in sorted(folder.glob("*.dll")) if system.has_stem(p.name, stem)), None)
    versioned = None
    for path in sorted(folder.glob("lib*.so*")):
        if not path.name.startswith(("libtorch", "libc10", "libcaffe2")):
            continue
        try:
            library = elf.read_shared_library(path)
        except (OSError, ValueError):
            continue
        for name in library.needed:
            if not name.startswith(stem):
                continue
            for place in (folder, *map(Path, library.runpath)):
                if os.path.isfile(place / name):  # a run path may lead where this user may not look
                    return str(place / name)
            if name != stem:
                versioned = name
    return versioned


def open_library(found: Found) -> ctypes.CDLL:
    """The ctypes library of a Found that has a path. Raises OSError."""
    if found.is_mapped:
        if system.on_windows():
            return ctypes.CDLL(found.path)  # a second time, which gives the mapped one
        return ctypes.CDLL(found.path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    return ctypes.CDLL(found.path)
