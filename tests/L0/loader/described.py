"""Machines and packs written down for tests; nothing here looks at the machine that runs them."""

import os
import subprocess
import sys
from pathlib import Path

from apex._loader.elf import CodeObject
from apex._loader.machine import Binding, Code, Compiler, Device, Machine, Pack, Torch

ROOT = Path(__file__).resolve().parents[3]
UNIT = "multi_tensor_scale"
NVRTC_128 = Compiler(
    "cuda", (12, 8), ("sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_120")
)
NVRTC_130 = Compiler("cuda", (13, 0), (*NVRTC_128.archs, "sm_103", "sm_110", "sm_121"))
HIPRTC = Compiler("rocm", (7, 2))
TORCH = Torch("2.13.0+cu130", "cf30153c", cuda="13.0")
BINDING = Binding("2.13", "torch2.13", "2.13.0", "cf30153c", "cp311")


def cubin(arch, toolkit=(13, 0), units=(UNIT,), fault=None):
    """A pack of cubins, each of one kernel."""
    code = Code(
        Path(f"{arch}.cubin"), CodeObject("cubin", arch, (f"{UNIT}_f32_f32",), toolkit=toolkit), fault
    )
    return Pack(arch, "cuda", "cubin", ("nvcc", ".".join(map(str, toolkit))), dict.fromkeys(units, code))


def ptx(arch, isa=(8, 0)):
    """A pack of PTX."""
    code = Code(Path(f"{arch}.ptx"), CodeObject("ptx", arch, (f"{UNIT}_f32_f32",), version=isa))
    return Pack(arch, "cuda", "ptx", ("nvcc", "12.0"), {UNIT: code})


def hsaco(arch, version=5, features=()):
    """A pack of AMD code objects."""
    contents = CodeObject("hsaco", arch, (f"{UNIT}_f32_f32",), features, version=version)
    return Pack(arch, "rocm", "hsaco", ("clang", "22"), {UNIT: Code(Path(f"{arch}.co"), contents)})


def machine(**facts):
    """A Machine with an installed library and the sources of the test's unit."""
    defaults = {"torch": TORCH, "python": "cp311", "cpu_level": 3, "cpu_units": (UNIT,), "sources": (UNIT,)}
    return Machine(**{**defaults, **facts})


def gpu(arch, index=0, features=()):
    return Device("hip" if arch.startswith("gfx") else "cuda", index, arch, features=features)


CPU = Device("cpu", 0, "x86-64-v3")


def python(code, *, check=True, **environment):
    """Runs Python code in a new process from the checkout, without apex's switches; the CompletedProcess."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("APEX_", "HSA_"))}
    kept = {**kept, "PYTHONPATH": str(ROOT), **{k: str(v) for k, v in environment.items()}}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=kept, cwd=ROOT / "tests")
    if check:
        assert done.returncode == 0, done.stderr
    return done
