"""A machine as data: what the choice of a variant depends on.

The loader describes the machine it runs on; tests and `python -m apex explain` write one down. Every function
that decides takes a `Machine` and asks nothing else.
"""

from __future__ import annotations

import difflib
import functools
import os
import platform as host
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apex._loader import bindings, packs, registry, tree
from apex._loader.fit import Binding, Torch

SWITCHES = (
    "APEX_VARIANT",
    "APEX_STRICT",
    "APEX_JIT",
    "APEX_CACHE_DIR",
    "APEX_TREE",
    "HSA_OVERRIDE_GFX_VERSION",
)


@dataclass(frozen=True)
class Device:
    """A device in torch's own order.

    platform: "cuda", "hip", "cpu", or torch's name of another device type ("xpu")
    index:    torch's index; 0 for the CPU
    arch:     "sm_90", "gfx942" (features stripped), "x86-64-v3"
    name:     the marketing name, for people
    features: what the driver says about settings of the chip: ("sramecc+", "xnack-")
    """

    platform: str
    index: int
    arch: str
    name: str = ""
    features: tuple[str, ...] = ()

    @property
    def capability(self) -> tuple[int, int] | None:
        """(major, minor) of an NVIDIA arch, else None."""
        return capability(self.arch)


@dataclass(frozen=True)
class Compiler:
    """A run-time compiler.

    vendor:  "cuda" (NVRTC) or "rocm" (hipRTC)
    version: (major, minor) of its toolkit
    archs:   archs it says it knows ("sm_75", ...), or None where it cannot be asked (hipRTC)
    path:    the library
    """

    vendor: str
    version: tuple[int, int]
    archs: tuple[str, ...] | None = None
    path: str = ""


@dataclass(frozen=True)
class Machine:
    """Everything that the choice depends on.

    torch:       None where it is not installed
    python:      tag such as "cp311"
    cuda_driver: newest CUDA that the NVIDIA driver serves, as (12, 4), or None
    hip_runtime: version of the HIP runtime, as (7, 2), or None
    cpu_level:   x86-64 level 1 to 4
    cpu_units:   units that libapex.so has a CPU variant of
    library:     why libapex.so cannot be used, or None
    packs, bindings: what is installed
    compilers:   run-time compilers, asked for only if nothing better serves
    no_compiler: vendor -> why there is none
    sources:     units whose device source is here
    env:         the switches of apex that are set
    binding:     why no binding serves this torch, or None; then no native variant can be reached
    failures:    (platform, index, unit, variant) -> why that variant was tried here and failed
    cards:       vendors ("cuda", "rocm") whose cards this process could open, whatever torch can use
    """

    torch: Torch | None = None
    python: str = ""
    system: str = "linux_x86_64"
    devices: tuple[Device, ...] = ()
    cuda_driver: tuple[int, int] | None = None
    hip_runtime: tuple[int, int] | None = None
    cpu_level: int = 1
    cpu_units: tuple[str, ...] = ()
    library: str | None = None
    packs: tuple[packs.Pack, ...] = ()
    bindings: tuple[Binding, ...] = ()
    compilers: Sequence[Compiler] = ()
    no_compiler: Mapping[str, str] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    binding: str | None = None
    failures: Mapping[tuple[str, int, str, str], str] = field(default_factory=dict)
    cards: tuple[str, ...] = ()


def capability(arch: str) -> tuple[int, int] | None:
    """(9, 0) of "sm_90" or "compute_90a"; None for anything else."""
    found = re.fullmatch(r"(?:sm|compute)_(\d+)(\d)[af]?", arch)
    return (int(found[1]), int(found[2])) if found else None


def strip_features(arch: str) -> tuple[str, tuple[str, ...]]:
    """("gfx942", ("sramecc+", "xnack-")) of "gfx942:sramecc+:xnack-"."""
    name, *features = arch.split(":")
    return name, tuple(features)


def cpu_device(level: int) -> Device:
    """The CPU as a device."""
    return Device("cpu", 0, f"x86-64-v{level}" if host.machine() == "x86_64" else host.machine())


_LEVELS = (  # the x86-64 psABI's levels, by the kernel's names of the flags
    (2, {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"}),
    (3, {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}),
    (4, {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
)


def cpu_level(flags: Set[str]) -> int:
    """x86-64 level, 1 to 4, of a processor with these flags (a set, as /proc/cpuinfo names them)."""
    reached = 1
    for level, needed in _LEVELS:
        if not needed <= flags:
            break
        reached = level
    return reached


def _cpu_flags():
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("flags"):
                    return set(line.split(":", 1)[1].split())
    except OSError:
        pass
    return set()


def cards(root: str = "/dev") -> tuple[str, ...]:
    """Vendors whose drivers show a card here, by their device nodes: torch does not tell of what it cannot use."""
    nodes = Path(root)
    found = {"cuda": any(re.fullmatch(r"nvidia\d+", node.name) for node in nodes.glob("nvidia*"))}
    found["rocm"] = (nodes / "kfd").exists() and any(nodes.glob("dri/renderD*"))
    return tuple(vendor for vendor, there in found.items() if there)


def torch_devices() -> tuple[Device, ...]:
    """The GPUs that torch sees, in torch's order; () without torch or without a GPU."""
    try:
        import torch
    except ImportError:
        return ()
    if not torch.cuda.is_available():
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        if torch.version.hip:
            arch, features = strip_features(facts.gcnArchName)
            found.append(Device("hip", index, arch, facts.name, features))
        else:
            found.append(Device("cuda", index, f"sm_{facts.major}{facts.minor}", facts.name))
    return tuple(found)


def system() -> str:
    """ "linux_x86_64": this machine, as wheels say it."""
    return f"{host.system().lower()}_{host.machine()}"


def switches(environment: Mapping[str, str]) -> Any:
    """The switches of apex that are set, and variables that look like one: APEX_VARIENT. An empty one is not set."""
    near = {name for name in environment if name.startswith("APEX_") and _misspelt(name)}
    return {name: environment[name] for name in (*SWITCHES, *sorted(near)) if environment.get(name)}


def _misspelt(name):
    return name not in SWITCHES and bool(difflib.get_close_matches(name, SWITCHES, 1, cutoff=0.85))


def describe() -> Machine:
    """This machine, read now. Opens a driver only where torch has a GPU; what is absent never raises."""
    from apex._loader import drivers, jit, library

    try:
        torch = bindings.running_torch()
    except ImportError:
        torch = None
    level = cpu_level(_cpu_flags())
    gpus = torch_devices()
    return Machine(
        torch=torch,
        python=bindings.python_tag(),
        system=system(),
        devices=(*gpus, cpu_device(level)),
        cuda_driver=drivers.cuda_version() if any(gpu.platform == "cuda" for gpu in gpus) else None,
        hip_runtime=drivers.hip_version() if any(gpu.platform == "hip" for gpu in gpus) else None,
        cpu_level=level,
        cpu_units=library.cpu_units(),
        library=library.fault(),
        packs=packs.installed(),
        bindings=bindings.installed(),
        compilers=jit.Compilers(torch),
        no_compiler=jit.Absent(torch),
        sources=registry.units() if tree.device_sources() else (),
        env=switches(os.environ),
        cards=cards(),
    )


@functools.cache
def here() -> Machine:
    """`describe()`, once a process."""
    return describe()
