"""NVRTC: the copy that torch has mapped or that its packages hold."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from apex._loader import system, vendor
from apex._loader.jit import rtc
from apex._loader.machine import Compiler, JitTarget

STEM = "libnvrtc.so"
BUILTINS = "libnvrtc-builtins.so"


@functools.cache
def _search() -> vendor.Found:
    return vendor.find(STEM)


def reason() -> str:
    """Why there is no NVRTC here, in words."""
    found = _search()
    if found.path is None:
        return found.reason
    try:
        open_library(found.path)
    except OSError as error:
        return f"NVRTC cannot be opened: {error}"
    return ""


def find(_toolkit: Any) -> Compiler | None:
    """The Compiler that belongs to the torch of this process, or None (then `reason` tells why)."""
    found = _search()
    if found.path is None:
        return None
    try:
        return describe(found.path)
    except OSError:
        return None


@functools.cache
def open_library(path: str) -> ctypes.CDLL:
    """The ctypes library at `path` (a path, or a versioned name). Raises OSError."""
    # The compiler opens its builtins by name and has no run path of its own; a mapped copy is found by name.
    for companion in sorted(Path(os.path.realpath(path)).parent.glob(system.pattern(BUILTINS))):
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(companion))
    return ctypes.CDLL(path)


@functools.cache
def describe(path: str) -> Compiler:
    """The Compiler at `path`: its version, and the archs that it says it knows. Raises OSError."""
    library = open_library(path)
    major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    numbers = (ctypes.c_int * count.value)()
    library.nvrtcGetSupportedArchs(numbers)
    return Compiler("cuda", (major.value, minor.value), tuple(f"sm_{number}" for number in numbers), path)


def identity(compiler: Compiler) -> Any:
    """What the cache key holds about the compiler."""
    return [compiler.version, rtc.identity(compiler.path, system.pattern(BUILTINS))]


def compile(
    target: JitTarget, name: str, source: bytes, headers: Mapping[str, bytes], options: Sequence[str]
) -> bytes:
    """The cubin (or PTX text) that a machine.JitTarget asks for, as bytes. Raises CompileError."""
    title = f"NVRTC {target.compiler.version[0]}.{target.compiler.version[1]}"
    result = "PTX" if target.kind == "ptx" else "CUBIN"
    library = open_library(target.compiler.path)
    return rtc.compile(library, "nvrtc", title, name, source, headers, options, result)
