"""hipRTC: the copy that torch has mapped or that its packages hold."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from apex._loader import vendor
from apex._loader.jit import rtc
from apex._loader.machine import Compiler, JitTarget

STEM = "libhiprtc.so"
_BEFORE_SPLIT = "libamdhip64.so"  # older ROCm keeps hipRTC inside the runtime


@functools.cache
def _search() -> vendor.Found:
    found = vendor.find(STEM)
    if found.path:
        return found
    runtime = vendor.find(_BEFORE_SPLIT)
    if runtime.path:
        try:
            if hasattr(vendor.open_library(runtime), "hiprtcCompileProgram"):
                return runtime
        except OSError:
            pass
    return found


def reason() -> str:
    """Why there is no hipRTC here, in words."""
    found = _search()
    if found.path is None:
        return found.reason
    try:
        open_library(found.path)
    except OSError as error:
        return f"hipRTC cannot be opened: {error}"
    return ""


def find(toolkit: Any) -> Compiler | None:
    """The Compiler that belongs to the torch of this process, or None (then `reason` tells why).

    toolkit: torch.version.hip; hiprtcVersion does not tell ROCm's (it says 9.0 under ROCm 7.2).
    """
    found = _search()
    if found.path is None:
        return None
    try:
        open_library(found.path)
    except OSError:
        return None
    return Compiler("rocm", version(toolkit), None, found.path)


def version(toolkit: str) -> Any:
    """(7, 2) of "7.2.53211"."""
    numbers = re.findall(r"\d+", toolkit or "")
    return (int(numbers[0]), int(numbers[1])) if len(numbers) > 1 else (0, 0)


@functools.cache
def open_library(path: str) -> ctypes.CDLL:
    """The ctypes library at `path` (a path, or a versioned name). Raises OSError."""
    return ctypes.CDLL(path)


def identity(compiler: Compiler) -> Any:
    """What the cache key holds about the compiler."""
    return [compiler.version, rtc.identity(compiler.path, "libhiprtc-builtins.so*", "libamd_comgr.so*")]


def compile(
    target: JitTarget, name: str, source: bytes, headers: Mapping[str, bytes], options: Sequence[str]
) -> bytes:
    """The code object that a machine.JitTarget asks for, as bytes. Raises CompileError."""
    title = f"hipRTC of ROCm {target.compiler.version[0]}.{target.compiler.version[1]}"
    library = open_library(target.compiler.path)
    return rtc.compile(library, "hiprtc", title, name, source, headers, options, "Code")
