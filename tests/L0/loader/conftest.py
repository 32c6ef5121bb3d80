"""Fixtures: code objects by the real compilers, small shared libraries, run-time compilers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from .described import ROOT

# What tests made once for their inputs, and keep: beside the outputs of the build.
STORE = Path(os.environ.get("APEX_STORE") or ROOT / "build" / "store").absolute() / "tests"
KERNELS = """
extern "C" __global__ void unit_one_f32(float* p) { p[threadIdx.x] *= 2; }
extern "C" __global__ void unit_one_f16(float* p) { p[threadIdx.x] += 2; }
"""
HIP_KERNELS = """
#define KERNEL extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(1, 256)))
KERNEL void unit_one_f32(float* p) { *p *= 2; }
KERNEL void unit_one_f16(float* p) { *p += 2; }
"""


def run(*command, **options):
    return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True, **options)


@pytest.fixture(scope="session")
def nvcc():
    """Path of nvcc."""
    found = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(found).is_file():
        pytest.skip("no nvcc on this machine")
    return found


@pytest.fixture(scope="session")
def cubin(nvcc, tmp_path_factory):
    """arch -> bytes of a cubin (sm_*) or PTX (compute_*) with two kernels."""
    folder = tmp_path_factory.mktemp("cubin")
    source = folder / "unit_one.cu"
    source.write_text(KERNELS)

    def build(arch):
        out = folder / arch
        if not out.exists():
            run(nvcc, "-ptx" if arch.startswith("compute") else "-cubin", f"-arch={arch}", source, "-o", out)
        return out.read_bytes()

    return build


@pytest.fixture(scope="session")
def rocm_root():
    """Root of the folder that holds the ROCm toolchain (ci/provision_rocm_toolchain.sh)."""
    root = Path(os.environ.get("APEX_ROCM_ROOT", ROOT / ".toolchains" / "rocm"))
    if not list(root.glob("usr/lib/llvm-*/bin/clang")):
        pytest.skip(f"no ROCm toolchain in {root} (APEX_ROCM_ROOT names it)")
    if os.geteuid() != 0:
        pytest.skip("the ROCm toolchain runs in a chroot, which needs root")
    return root


@pytest.fixture(scope="session")
def hsaco(rocm_root, tmp_path_factory):
    """arch -> bytes of an AMD code object with two kernels."""
    clang = sorted(rocm_root.glob("usr/lib/llvm-*/bin/clang"))[-1].relative_to(rocm_root)

    def build(arch):
        version = 6 if arch.endswith("-generic") else 5
        options = ["-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib"]
        options += ["-O3", "-std=c++17", "-ffp-contract=off", "-fuse-cuid=none"]
        where = (f"--offload-arch={arch}", f"-mcode-object-version={version}", "-", "-o", "-")
        command = ["chroot", str(rocm_root), f"/{clang}", *options, *where]
        return subprocess.run(command, input=HIP_KERNELS.encode(), check=True, capture_output=True).stdout

    return build


@pytest.fixture
def shared_library(tmp_path):
    """Builds an empty-ish shared library: (path, soname, needed paths, run path, symbol) -> path."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler on this machine")

    def build(path, soname, needed=(), runpath=None, symbol="marker", value=1):
        path = tmp_path / path
        path.parent.mkdir(parents=True, exist_ok=True)
        source = path.with_suffix(".c")
        source.write_text(f"int {symbol}(void) {{ return {value}; }}\n")
        link = [f"-Wl,-soname,{soname}", "-Wl,--no-as-needed", *map(str, needed)]
        if runpath:
            link.append(f"-Wl,-rpath,{runpath}")
        run(compiler, "-shared", "-fPIC", "-o", path, source, *link)
        source.unlink()
        return path

    return build


def _nvrtc(requirement):
    """Path of NVRTC from PyPI, kept in the build's store; skips where it cannot be had."""
    folder = STORE / "tools" / requirement.replace("=", "").replace("*", "")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not list(folder.glob("**/libnvrtc.so.*")):
            options = ["-q", "--no-deps", "--target", str(folder), requirement]
            command = [sys.executable, "-m", "pip", "install", *options]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"{requirement} cannot be had from PyPI here: {done.stderr.strip()[-200:]}")
    return str(next(folder.glob("**/libnvrtc.so.*")))


@pytest.fixture(scope="session")
def nvrtc_130():
    return _nvrtc("nvidia-cuda-nvrtc==13.0.88")


@pytest.fixture(scope="session")
def nvrtc_128():
    return _nvrtc("nvidia-cuda-nvrtc-cu12==12.8.93")
