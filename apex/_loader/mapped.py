"""The shared libraries that this process has mapped."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

from apex._loader import elf, system


class _Info(ctypes.Structure):  # struct dl_phdr_info of <link.h>; only the beginning is read
    _fields_ = [("address", ctypes.c_uint64), ("name", ctypes.c_char_p)]


_Visit = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Info), ctypes.c_size_t, ctypes.c_void_p)


def paths() -> list[str]:
    """Absolute paths of the mapped shared libraries, in load order."""
    if system.on_windows():
        return _of_windows()
    found = []

    def visit(info: Any, _size: int, _data: Any) -> int:
        name = info.contents.name
        if name and name.startswith(b"/"):
            found.append(os.fsdecode(name))
        return 0

    iterate = ctypes.CDLL(None).dl_iterate_phdr
    iterate(_Visit(visit), None)
    return found


def _of_windows() -> list[str]:
    """By EnumProcessModules, which kernel32 exports with this prefix."""
    kernel = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined]
    kernel.GetCurrentProcess.restype = handle = ctypes.c_void_p
    kernel.K32EnumProcessModules.argtypes = [handle, handle, ctypes.c_uint32, handle]
    kernel.GetModuleFileNameW.argtypes = [handle, ctypes.c_wchar_p, ctypes.c_uint32]
    modules, needed = (handle * 4096)(), ctypes.c_uint32()
    if not kernel.K32EnumProcessModules(
        kernel.GetCurrentProcess(), modules, ctypes.sizeof(modules), ctypes.byref(needed)
    ):
        return []
    path, found = ctypes.create_unicode_buffer(32768), []
    for module in modules[: needed.value // ctypes.sizeof(handle)]:
        if kernel.GetModuleFileNameW(module, path, len(path)):
            found.append(path.value)
    return found


@functools.cache
def soname(path: str) -> str:
    """Soname of the library at `path`; its file name if it has none or cannot be read."""
    try:
        return elf.read_shared_library(path).soname or Path(path).name
    except (OSError, ValueError):
        return Path(path).name


def _is_of(path: str, stem: str) -> bool:
    if system.on_windows():
        return system.has_stem(Path(path).name, stem)
    # Files are often renamed copies; a name without the stem's first letters is not worth opening.
    return Path(path).name.startswith(stem.split(".")[0]) and soname(path).startswith(stem)


def find(stem: str) -> list[str]:
    """Mapped libraries whose soname begins with `stem`, such as "libamdhip64.so", as real paths without
    repeats."""
    found = []
    for path in paths():
        if _is_of(path, stem):
            real = str(Path(path).resolve())
            if real not in found:
                found.append(real)
    return found
