"""What NVRTC and hipRTC have in common: the same interface under two prefixes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from apex._loader.errors import CompileError


def identity(library: str, *companions: Any) -> Any:
    """What tells one build of a compiler from another: real names, sizes and times of its files.

    library:    path of the compiler
    companions: patterns of files beside it that it loads
    """
    real = Path(os.path.realpath(library))
    files = [real, *(path for pattern in companions for path in sorted(real.parent.glob(pattern)))]
    facts = []
    for path in dict.fromkeys(Path(os.path.realpath(file)) for file in files):
        try:
            facts.append((path.name, path.stat().st_size, path.stat().st_mtime_ns))
        except OSError:
            facts.append((path.name, 0, 0))
    return facts


def compile(
    library: ctypes.CDLL,
    prefix: str,
    title: str,
    name: str,
    source: bytes,
    headers: Mapping[str, bytes],
    options: Sequence[str],
    result: str,
) -> bytes:
    """Compiles `source` (bytes) and returns the bytes that `<prefix>Get<result>` gives.

    headers: {name: text}, all that `#include` finds
    Raises CompileError with the options and the end of the log.
    """
    # In a thread of its own: NVRTC 12.3 leaves the locale C to the thread that calls it, whose files then are ASCII.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(
            _compile, library, prefix, title, name, source, headers, options, result
        ).result()


def _compile(
    library: ctypes.CDLL,
    prefix: str,
    title: str,
    name: str,
    source: bytes,
    headers: Mapping[str, bytes],
    options: Sequence[str],
    result: str,
) -> bytes:
    call = _Caller(library, prefix, title)
    program = ctypes.c_void_p()
    names = (ctypes.c_char_p * len(headers))(*(key.encode() for key in headers))
    texts = (ctypes.c_char_p * len(headers))(*headers.values())
    call("CreateProgram", ctypes.byref(program), source, name.encode(), len(headers), texts, names)
    try:
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = call.status("CompileProgram", program, len(options), arguments)
        if status:
            log = (
                call.bytes(program, "GetProgramLogSize", "GetProgramLog")
                .rstrip(b"\0")
                .decode("utf-8", "replace")
            )
            raise CompileError(
                f"{title} cannot compile {name}: {call.text(status)}",
                wanted=" ".join(options),
                found=log.strip()[-4000:] or "an empty log",
            )
        return call.bytes(program, f"Get{result}Size", f"Get{result}")
    finally:
        call.status("DestroyProgram", ctypes.byref(program))


class _Caller:
    """Calls functions of one compiler and turns failures into CompileError. ctypes releases the GIL
    meanwhile."""

    def __init__(self, library: ctypes.CDLL, prefix: str, title: str) -> None:
        self._library, self._prefix, self._title = library, prefix, title

    def status(self, function: str, *arguments: Any) -> int:
        return getattr(self._library, self._prefix + function)(*arguments)

    def text(self, status: int) -> str:
        function = getattr(self._library, self._prefix + "GetErrorString")
        function.restype = ctypes.c_char_p
        return (function(status) or b"").decode() or f"code {status}"

    def __call__(self, function: str, *arguments: Any) -> None:
        status = self.status(function, *arguments)
        if status:
            raise CompileError(f"{self._title} failed in {self._prefix}{function}: {self.text(status)}")

    def bytes(self, program: Any, size_function: str, function: str) -> Any:
        size = ctypes.c_size_t()
        self(size_function, program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self(function, program, buffer)
        return buffer.raw
