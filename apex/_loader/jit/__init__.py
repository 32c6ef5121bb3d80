"""Compilation at run time: NVRTC and hipRTC, by ctypes, from the device sources of this installation.

No toolkit, no header outside `apex/device`, no compiler process and no network. Code is compiled with the
meaning of the packs' flags (flags.py), so that it agrees with them bit for bit, and kept in a disk cache
(cache.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from apex._loader import elf
from apex._loader.errors import CompileError
from apex._loader.jit import cache, flags, hiprtc, nvrtc, sources
from apex._loader.machine import Compiler, JitTarget, Torch


class Compilers(Sequence[Compiler]):
    """The run-time compilers that belong to a build of torch (a machine.Torch or None).

    They are looked for when the sequence is first read: a process whose packs serve never opens one.
    """

    def __init__(self, torch: Torch | None) -> None:
        self._torch = torch
        self._found: tuple[Compiler, ...] | None = None

    def _list(self) -> tuple[Compiler, ...]:
        if self._found is None:
            self._found = tuple(find(self._torch))
        return self._found

    def __getitem__(self, index: Any) -> Any:
        return self._list()[index]

    def __len__(self) -> int:
        return len(self._list())


def find(torch: Torch | None) -> Iterator[Compiler]:
    """Yields the machine.Compiler of each vendor that this build of torch was made for, where it can be
    opened."""
    for backend, version in ((nvrtc, torch and torch.cuda), (hiprtc, torch and torch.hip)):
        if version:
            compiler = backend.find(version)
            if compiler:
                yield compiler


class Absent(Mapping[str, str]):
    """vendor -> why there is no run-time compiler for it, for a build of torch; found out when read."""

    def __init__(self, torch: Torch | None) -> None:
        self._torch = torch

    def __getitem__(self, vendor: str) -> str:
        backend, name = {"cuda": (nvrtc, "CUDA"), "rocm": (hiprtc, "ROCm")}[vendor]
        toolkit = getattr(self._torch, "cuda" if vendor == "cuda" else "hip", None)
        return backend.reason() if toolkit else f"this torch is not built for {name}"

    def __iter__(self) -> Iterator[str]:
        return iter(("cuda", "rocm"))

    def __len__(self) -> int:
        return 2


def build(unit: str, target: JitTarget, driver: tuple[int, int] | None = None) -> bytes:
    """Machine code (or PTX) of a unit for a machine.JitTarget, as bytes, from the cache or compiled now.

    driver: newest CUDA that the driver serves: PTX is kept for it alone.

    Raises CompileError, with the compiler's log, when the source does not compile.
    """
    backend = nvrtc if target.compiler.vendor == "cuda" else hiprtc
    source, headers = sources.read(unit)
    options = flags.options(target)
    key = cache.key(
        unit=unit,
        source=sources.digest(source, headers),
        arch=target.arch,
        kind=target.kind,
        options=options,
        compiler=backend.identity(target.compiler),
        driver=driver if target.kind == "ptx" else None,
    )
    return cache.fetch(key, lambda: _compile(backend, unit, target, source, headers, options))


def _compile(
    backend: Any,
    unit: str,
    target: JitTarget,
    source: bytes,
    headers: Mapping[str, bytes],
    options: Sequence[str],
) -> bytes:
    image = backend.compile(target, f"{unit}.cu", source, headers, options)
    try:
        contents = elf.read_code_object(image)
    except elf.NotElf as error:
        raise CompileError(f"the run-time compiler gave no code object for {unit}: {error}") from error
    if not contents.kernels:
        raise CompileError(f"the run-time compiler gave an object without kernels for {unit}")
    return image
