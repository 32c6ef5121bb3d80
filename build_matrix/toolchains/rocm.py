"""clang of ROCm: of a Debian chroot (APEX_ROCM_ROOT, else .toolchains/rocm), or of a ROCm that is installed.

A chroot's clang cannot run from outside: its C library is newer than the machine's, and clang starts itself
and lld by /proc/self/exe. `chroot` costs 30 ms a file; without root, a user namespace lends the right to it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cached_property
from pathlib import Path

from build_matrix.spec.archs import Arch
from build_matrix.store import DigestCache, digest, files
from build_matrix.toolchains.base import Compiled, Toolchain, provisioned_root, run

LIBRARIES = ("libclang-cpp.so*", "libLLVM.so*", "libLLVM-*.so*", "liblld*.so*")


class ClangHip(Toolchain):
    name = "clang-hip"
    vendor = "rocm"

    def __init__(self, clang: Path, chroot: Path | None = None):
        """`clang` as seen from inside `chroot`, when there is one."""
        self.clang, self.chroot = clang, chroot
        text = subprocess.run(self._command(["--version"]), text=True, capture_output=True, check=True).stdout
        match = re.search(r"clang version (\d+\.\d+\.\d+)", text)
        if not match:
            raise ValueError(f"{clang} does not say its version")
        self.version = f"{self._rocm_version()}+clang{match[1]}"

    def _command(self, arguments: list[str], folder: str = "/") -> list[str]:
        if not self.chroot:
            return [str(self.clang), *arguments]
        lend = [] if os.geteuid() == 0 else ["unshare", "--map-root-user"]
        # What TMPDIR names is outside.
        script = f'cd "{folder}" && TMPDIR="{folder}" exec "$0" "$@"'
        return [*lend, "chroot", str(self.chroot), "/bin/sh", "-c", script, str(self.clang), *arguments]

    def _rocm_version(self) -> str:
        """The version of ROCm: the package's in a Debian chroot, else the file that ROCm installs."""
        if self.chroot:
            status = (self.chroot / "var/lib/dpkg/status").read_text(errors="replace")
            match = re.search(r"^Package: hipcc\n(?:.+\n)*?Version: (\d+\.\d+\.\d+)", status, re.MULTILINE)
        else:
            home = self.clang.resolve().parent.parent.parent.parent
            info = [home / ".info/version", Path("/opt/rocm/.info/version")]
            text = next((path.read_text() for path in info if path.is_file()), "")
            match = re.match(r"(\d+\.\d+\.\d+)", text)
        return match[1] if match else "0.0.0"

    @cached_property
    def digest(self) -> str:
        """clang's own program is small: libLLVM and libclang-cpp decide the code."""
        inside = (self.chroot or Path("/")) / self.clang.relative_to("/")
        folders = [inside.resolve().parent.parent / "lib"]
        if self.chroot:
            folders.append(self.chroot / "usr/lib/x86_64-linux-gnu")
        files = {path.resolve() for folder in folders for name in LIBRARIES for path in folder.glob(name)}
        lld = inside.parent / "lld"
        return DigestCache().of_files(
            sorted({*files, inside.resolve(), *([lld.resolve()] if lld.exists() else [])})
        )

    def flags(self, arch: Arch) -> list[str]:
        # No vendor header or device library is needed (3 times faster); without -fuse-cuid=none the object
        # would hold a hash of its path.
        return [
            "-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib", "-O3",
            "-std=c++17", "-ffp-contract=off", "-fuse-cuid=none", f"-mcode-object-version={arch.code_object}",
            f"--offload-arch={arch.name}",
        ]  # fmt: skip

    def compile(self, source: Path, arch: Arch) -> Compiled:
        what = f"{source.name} for {arch.name}"
        if not self.chroot:
            with files.temporary("hip") as folder:
                output = folder / "out.co"
                run(
                    what,
                    self._command([*self.flags(arch), source.name, "-o", str(output)]),
                    cwd=source.parent,
                )
                return Compiled(output.read_bytes())
        with files.temporary("hip", self.chroot / "tmp") as folder:
            for name, path in digest.closure(source).items():
                shutil.copyfile(path, folder / name)
            inside = "/" + str(folder.relative_to(self.chroot))
            run(what, self._command([*self.flags(arch), source.name, "-o", "out.co"], inside))
            return Compiled((folder / "out.co").read_bytes())


def candidates() -> list[tuple[Path, Path | None]]:
    """(clang, chroot) of this machine: a named root first, then the provisioned chroot, then an installed
    ROCm."""
    found: list[tuple[Path, Path | None]] = []
    roots = [Path(os.environ["APEX_ROCM_ROOT"])] if os.environ.get("APEX_ROCM_ROOT") else []
    for root in [*roots, provisioned_root() / "rocm"]:
        for clang in sorted(root.glob("usr/lib/llvm-*/bin/clang"), reverse=True):
            found.append((Path("/") / clang.relative_to(root), root))
    for home in dict.fromkeys(filter(None, [*map(str, roots), os.environ.get("ROCM_PATH"), "/opt/rocm"])):
        for clang in (Path(home) / "lib/llvm/bin/clang", Path(home) / "llvm/bin/clang"):
            if clang.is_file():
                found.append((clang, None))
                break
    return found
