"""Compiles device sources to AMD code objects with a ROCm clang, as the packs are compiled.

``APEX_ROCM_ROOT`` names the toolchain: a chroot made by ci/provision_rocm_toolchain.sh (default
``.toolchains/rocm``), or an installed ROCm (``/opt/rocm``).
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
STORE = pathlib.Path(os.environ.get("APEX_STORE") or ROOT / "build" / "store").absolute()
OUTPUT = STORE / "tests" / "emulated"
ARCHES = ("gfx950", "gfx1100", "gfx1201")  # wave64 CDNA, wave32 RDNA3 and RDNA4: what the emulator knows
FLAGS = (
    "-x",
    "hip",
    "--cuda-device-only",
    "--no-gpu-bundle-output",
    "-nogpuinc",
    "-nogpulib",
    "-O3",
    "-std=c++17",
    "-ffp-contract=off",
    "-fuse-cuid=none",
    "-mcode-object-version=5",
)
SOURCE_FOLDERS = ("csrc/device", "csrc/testing")


def rocm_root() -> pathlib.Path:
    """Where the ROCm toolchain is, or should be."""
    return pathlib.Path(os.environ.get("APEX_ROCM_ROOT") or ROOT / ".toolchains" / "rocm")


def _chrooted_clang(root: pathlib.Path) -> str | None:
    found = (
        sorted((root / "usr" / "bin").glob("clang++-[0-9]*"))
        if (root / "usr" / "bin" / "hipcc").exists()
        else []
    )
    return f"/usr/bin/{found[-1].name}" if found and root != pathlib.Path("/") else None


def _installed_clang(root: pathlib.Path) -> str | None:
    for place in ("llvm/bin/clang++", "lib/llvm/bin/clang++"):
        if (root / place).exists():
            return str(root / place)
    return None


def why_not() -> str:
    """Why nothing can be emulated here; "" if it can."""
    root = rocm_root()
    if not _chrooted_clang(root) and not _installed_clang(root):
        return f"no ROCm clang in {root} (APEX_ROCM_ROOT)"
    emulator = os.environ.get("APEX_AMD_EMULATOR")
    if not emulator or not (pathlib.Path(emulator) / "run_hsaco.py").exists():
        return "APEX_AMD_EMULATOR does not name a folder that holds run_hsaco.py"
    if not (pathlib.Path(os.environ.get("TINYGRAD_SRC") or "/nonexistent") / "test" / "mockgpu").exists():
        return "TINYGRAD_SRC does not name a tinygrad checkout"
    return ""


def _enter(root: pathlib.Path) -> list[str]:
    """The command that runs another inside the chroot. Who is not root needs a user namespace for it."""
    return ["chroot", str(root)] if os.geteuid() == 0 else ["unshare", "--map-root-user", f"--root={root}"]


def _sources() -> list[pathlib.Path]:
    return sorted(
        path
        for folder in SOURCE_FOLDERS
        for path in (ROOT / folder).iterdir()
        if path.suffix in (".h", ".cu")
    )


@functools.cache
def _version(root: pathlib.Path) -> str:
    clang = _chrooted_clang(root)
    command = [*_enter(root), clang, "--version"] if clang else [_installed_clang(root), "--version"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _clang(folder: pathlib.Path, arguments: list[str]) -> list[str]:
    """A clang command whose relative paths start at `folder`, inside the chroot if there is one."""
    root = rocm_root()
    if chrooted := _chrooted_clang(root):
        inside = "/" + str(folder.relative_to(root))
        return [*_enter(root), "/bin/sh", "-c", 'cd "$0" && exec "$@"', inside, chrooted, *arguments]
    return ["/bin/sh", "-c", 'cd "$0" && exec "$@"', str(folder), _installed_clang(root), *arguments]


def compile_source(source: pathlib.Path, arch: str, flags: tuple[str, ...] = FLAGS) -> pathlib.Path:
    """Compiles one device source, once for each content, whoever else asks for it at the same time.

    Returns:
        The path of the code object, or of what else the flags ask for.

    Raises:
        RuntimeError: clang's messages.
    """
    state = hashlib.sha256(repr((_version(rocm_root()), flags, arch, str(source.relative_to(ROOT)))).encode())
    for path in [*(p for p in _sources() if p.suffix == ".h"), source]:
        state.update(hashlib.sha256(path.read_bytes()).digest())
    output = OUTPUT / f"{source.stem}-{arch}-{state.hexdigest()[:20]}.co"
    if output.exists():
        return output
    OUTPUT.mkdir(parents=True, exist_ok=True)
    with open(output.with_suffix(".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # others that want it wait; who dies lets go
        if not output.exists():
            _compile(source, arch, output, flags)
    return output


def _compile(source: pathlib.Path, arch: str, output: pathlib.Path, flags: tuple[str, ...]) -> None:
    """Writes the output whole, or raises RuntimeError with clang's messages."""
    root = rocm_root()
    inside = _chrooted_clang(root) is not None
    with tempfile.TemporaryDirectory(prefix="emulated-", dir=root / "tmp" if inside else None) as scratch:
        folder = pathlib.Path(scratch)
        for path in _sources():  # a chroot does not see this tree
            (folder / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / path.relative_to(ROOT))
        includes = [f"-I{name}" for name in SOURCE_FOLDERS]
        command = [*flags, f"--offload-arch={arch}", *includes, str(source.relative_to(ROOT)), "-o", "out.co"]
        done = subprocess.run(_clang(folder, command), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{source.name} for {arch}:\n{done.stderr}")
        temporary = output.with_suffix(f".{os.getpid()}.tmp")
        shutil.copy(folder / "out.co", temporary)
        temporary.rename(output)
