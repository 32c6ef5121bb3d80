"""NVRTC by ctypes, from NVIDIA's packages on the package index: compiles without a toolkit and without
headers."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

from build_matrix.errors import CompileError
from build_matrix.spec.archs import Arch
from build_matrix.store import DigestCache, digest
from build_matrix.toolchains import ptxas
from build_matrix.toolchains.base import Compiled, Toolchain, provisioned_root


class Nvrtc(Toolchain):
    name = "nvrtc"
    vendor = "cuda"

    def __init__(self, path: Path, version: str):
        """`path` is libnvrtc.so.N; `version` the full version of its package (NVRTC itself says only
        12.8)."""
        self.path, self.version = path, version

    @cached_property
    def library(self) -> ctypes.CDLL:
        # NVRTC opens its builtins by bare name; it finds them because they are mapped already.
        for builtins in sorted(self.path.parent.glob("libnvrtc-builtins.so*")):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(self.path))

    @cached_property
    def digest(self) -> str:
        return DigestCache().of_files(sorted(self.path.parent.glob("libnvrtc*.so*")))

    @cached_property
    def archs(self) -> list[str]:
        count = ctypes.c_int()
        self.library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self.library.nvrtcGetSupportedArchs(numbers)
        return [f"{prefix}_{number}" for prefix in ("sm", "compute") for number in numbers]

    def flags(self, arch: Arch) -> list[str]:
        # nvcc takes a function without execution space for a host function and leaves it out; NVRTC refuses
        # it.
        return [f"--gpu-architecture={arch.name}", "-std=c++17", "--fmad=false", "-default-device"]

    def compile(self, source: Path, arch: Arch) -> Compiled:
        # In a thread of its own: NVRTC 12.3 leaves the locale C to the thread that called it.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self._compile, source, arch).result()

    def _compile(self, source: Path, arch: Arch) -> Compiled:
        headers = {name: path for name, path in digest.closure(source).items() if path != source.resolve()}
        names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
        texts = (ctypes.c_char_p * len(headers))(*(path.read_bytes() for path in headers.values()))
        program = ctypes.c_void_p()
        library, what = self.library, f"{source.name} for {arch.name}"
        status = library.nvrtcCreateProgram(
            ctypes.byref(program), source.read_bytes(), source.name.encode(), len(headers), texts, names
        )
        if status:
            raise CompileError(what, ["nvrtcCreateProgram"], f"status {status}")
        try:
            verbose = [] if arch.kind == "ptx" else ["--ptxas-options=-v"]
            options = [option.encode() for option in self.flags(arch) + verbose]
            status = library.nvrtcCompileProgram(
                program, len(options), (ctypes.c_char_p * len(options))(*options)
            )
            log = self._get(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if status:
                raise CompileError(
                    what, [f"nvrtc {self.version}", *self.flags(arch)], f"status {status}\n{log}"
                )
            image = self._get(program, "PTX" if arch.kind == "ptx" else "CUBIN")
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))
        return Compiled(image.rstrip(b"\0") if arch.kind == "ptx" else image, ptxas.spills(log))

    def _get(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self.library, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw


def candidates() -> list[tuple[Path, str]]:
    """(libnvrtc, package version) of every provisioned NVRTC; APEX_NVRTC names another as PATH=VERSION."""
    found = []
    if os.environ.get("APEX_NVRTC"):
        path, _, version = os.environ["APEX_NVRTC"].partition("=")
        found.append((Path(path), version))
    for root in sorted(provisioned_root().glob("nvrtc-*"), reverse=True):
        for info in root.glob("nvidia_cuda_nvrtc*.dist-info"):
            version = info.name.removesuffix(".dist-info").rpartition("-")[2]
            libraries = sorted(root.glob("nvidia/*/lib/libnvrtc.so.*"))
            found += [(path, version) for path in libraries if ".alt." not in path.name]
    return found
