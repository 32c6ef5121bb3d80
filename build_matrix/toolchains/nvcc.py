"""nvcc of a CUDA toolkit, or assembled from NVIDIA's packages on the package index."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cached_property
from pathlib import Path

from build_matrix.spec.archs import Arch
from build_matrix.store import DigestCache, files
from build_matrix.toolchains import inputs, ptxas
from build_matrix.toolchains.base import Compiled, Toolchain, provisioned_root, run


class Nvcc(Toolchain):
    name = "nvcc"
    vendor = "cuda"

    def __init__(self, path: Path):
        """`path` is the nvcc program. Raises OSError or ValueError when it is none."""
        self.path = path
        text = subprocess.run([str(path), "--version"], text=True, capture_output=True, check=True).stdout
        match = re.search(r"release [\d.]+, V([\d.]+)", text)
        if not match:
            raise ValueError(f"{path} does not say its version")
        self.version = match[1]

    @cached_property
    def digest(self) -> str:
        """nvcc alone does not decide the code: cudafe++, cicc and ptxas do."""
        home = self.path.resolve().parent.parent
        programs = ["bin/nvcc", "bin/cudafe++", "bin/ptxas", "nvvm/bin/cicc", "bin/crt/prelink.stub"]
        return DigestCache().of_files([home / name for name in programs if (home / name).is_file()])

    @property
    def headers(self) -> Path:
        # nvcc names them through targets/x86_64-linux/include: that is a link to this folder, or this one to that.
        return self.path.resolve().parent.parent / "include"

    @cached_property
    def archs(self) -> list[str]:
        codes = subprocess.run(
            [str(self.path), "--list-gpu-code"], text=True, capture_output=True
        ).stdout.split()
        virtual = subprocess.run(
            [str(self.path), "--list-gpu-arch"], text=True, capture_output=True
        ).stdout.split()
        return codes + virtual

    def flags(self, arch: Arch) -> list[str]:
        kind = "-ptx" if arch.kind == "ptx" else "-cubin"
        return [kind, f"-arch={arch.name}", "-O3", "-std=c++17", "--fmad=false"]

    def compile(self, source: Path, arch: Arch) -> Compiled:
        with files.temporary("nvcc") as folder:
            output, rule = folder / f"out{arch.suffix}", folder / "out.d"
            verbose = [] if arch.kind == "ptx" else ["-Xptxas", "-v"]
            # Run beside the source with a relative name, so that no path of this machine can enter the
            # output.
            named = ["-MD", "-MF", str(rule), "-o", str(output)]
            command = [str(self.path), *self.flags(arch), *verbose, source.name, *named]
            log = run(f"{source.name} for {arch.name}", command, cwd=source.parent)
            read = inputs.of_rule(rule.read_text(encoding="utf-8", errors="surrogateescape"))
            return Compiled(
                output.read_bytes(), ptxas.spills(log), tuple(str(source.parent / name) for name in read)
            )


def candidates() -> list[Path]:
    """nvcc programs of this machine, first the one that was asked for by name."""
    found = [Path(os.environ["APEX_NVCC"])] if os.environ.get("APEX_NVCC") else []
    found += sorted(provisioned_root().glob("nvcc-*/nvidia/cu*/bin/nvcc"), reverse=True)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            found.append(Path(os.environ[variable]) / "bin/nvcc")
    if on_path := shutil.which("nvcc"):
        found.append(Path(on_path))
    found += sorted(Path("/usr/local").glob("cuda*/bin/nvcc"), reverse=True)
    unique = list({path.resolve(): path for path in reversed(found) if path.is_file()}.values())[::-1]
    # A wrapper on PATH is no toolkit: what decides the code (cicc) would be missing from its digest.
    return sorted(unique, key=lambda path: not (path.resolve().parent.parent / "nvvm/bin/cicc").is_file())
