"""The shared libraries that this process has mapped."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

from apex._loader import elf


class _Info(ctypes.Structure):  # struct dl_phdr_info of <link.h>; only the beginning is read
    _fields_ = [("address", ctypes.c_uint64), ("name", ctypes.c_char_p)]


_Visit = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Info), ctypes.c_size_t, ctypes.c_void_p)


def paths() -> list[str]:
    """Absolute paths of the mapped shared libraries, in load order."""
    found = []

    def visit(info: Any, _size: int, _data: Any) -> int:
        name = info.contents.name
        if name and name.startswith(b"/"):
            found.append(os.fsdecode(name))
        return 0

    iterate = ctypes.CDLL(None).dl_iterate_phdr
    iterate(_Visit(visit), None)
    return found


@functools.cache
def soname(path: str) -> str:
    """Soname of the library at `path`; its file name if it has none or cannot be read."""
    try:
        return elf.read_shared_library(path).soname or Path(path).name
    except (OSError, ValueError):
        return Path(path).name


def find(stem: str) -> list[str]:
    """Mapped libraries whose soname begins with `stem`, such as "libamdhip64.so", as real paths without
    repeats."""
    found = []
    for path in paths():
        # Files are often renamed copies; a name without the stem's first letters is not worth opening.
        if Path(path).name.startswith(stem.split(".")[0]) and soname(path).startswith(stem):
            real = str(Path(path).resolve())
            if real not in found:
                found.append(real)
    return found
