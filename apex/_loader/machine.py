"""A machine as data: what the choice of a binding and of a variant depends on.

The probe describes the machine it runs on (probe.py); tests and `python -m apex explain` write one down
(explain.py). Every function that decides takes a `Machine` and asks nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from apex._loader.elf import CodeObject


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
class Torch:
    """A build of torch: what its version.py and its C++ ABI flag say.

    version:     as torch prints it, "2.13.0+cu130"
    git_version: commit it was built from, or None
    cuda, hip:   toolkit versions, "13.0" / "7.2.53211", or None
    cxx11_abi:   the C++ standard library ABI; False only for old builds
    """

    version: str
    git_version: str | None = None
    cuda: str | None = None
    hip: str | None = None
    cxx11_abi: bool = True

    @property
    def minor(self) -> str | None:
        """ "2.13" of "2.13.0+cu130", or None if the version cannot be read."""
        found = VERSION.fullmatch(self.version)
        return f"{int(found[1])}.{int(found[2])}" if found else None


VERSION = re.compile(
    r"(\d+)\.(\d+)(?:\.(\d+))?(?P<pre>(?:a|b|rc|\.?dev)\d*|)(?:\.?post\d+)?(?:\+(?P<local>.+))?"
)


@dataclass(frozen=True)
class Binding:
    """A row of bindings.json: what a binding was built against, and its folder under `lib/`."""

    torch: str
    folder: str
    built_against: str = ""
    git_version: str | None = None
    python: str | None = None
    cxx11_abi: bool = True
    grade: str = ""


@dataclass(frozen=True)
class Code:
    """A unit's code object as described: `contents` says what it holds, or `fault` why it cannot be used. `path` is
    None where it is known from a table alone."""

    path: Path | None
    contents: CodeObject | None = None
    fault: str | None = None


@dataclass(frozen=True)
class Pack:
    """Code objects of one arch.

    arch:     "sm_90", "compute_80" (PTX), "gfx942", "gfx9-4-generic"
    vendor:   "cuda" or "rocm"
    kind:     "cubin", "ptx" or "hsaco"
    compiler: (name, version), such as ("nvcc", "13.0.88")
    units:    unit name -> Code; a unit that is absent was not built for this arch
    fault:    why the whole pack cannot be used, or None
    """

    arch: str
    vendor: str
    kind: str
    compiler: tuple[str, str] = ("", "")
    units: Mapping[str, Code] = field(default_factory=dict)
    fault: str | None = None

    def __hash__(self) -> int:
        return hash((self.arch, self.vendor, self.kind))


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
class JitTarget:
    """What to ask a run-time compiler for: `kind` "cubin", "ptx" or "hsaco" of `arch`."""

    compiler: Compiler
    kind: str
    arch: str


@dataclass(frozen=True)
class Npu:
    """What is known of Ascend NPUs: the versions of `torch_npu` and of `cann`; empty where nobody said."""

    torch_npu: str = ""
    cann: str = ""


@dataclass(frozen=True)
class Machine:
    """Everything that the choice depends on.

    torch:       None where it is not installed
    python:      tag such as "cp311"
    system:      "linux_x86_64"
    cuda_driver: newest CUDA that the NVIDIA driver serves, as (12, 4), or None
    hip_runtime: version of the HIP runtime, as (7, 2), or None
    cpu_level:   x86-64 level 1 to 4; of aarch64 1 (NEON) or 2 (SVE)
    cpu_units:   units that libapex.so has a CPU variant of
    library:     why libapex.so cannot be used, or None
    portable:    why the portable binding cannot serve any torch, or None
    packs, bindings: what is installed
    stale:       why the bindings, which are older than their sources, are not loaded; else None
    compilers:   run-time compilers, asked for only if nothing better serves
    no_compiler: vendor -> why there is none
    sources:     units whose device source is here
    env:         the switches of apex that are set
    binding:     why no binding serves this torch, or None; then no native variant can be reached
    failures:    (platform, index, unit, variant) -> why that variant was tried here and failed
    cards:       vendors ("cuda", "rocm") whose cards this process could open, whatever torch can use
    vendor:      "cuda", "rocm", "npu" or "cpu": what this installation was built for, by its build.json; else ""
    npu:         the Npu where tensors may lie on Ascend's, else None
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
    portable: str | None = None
    packs: tuple[Pack, ...] = ()
    bindings: tuple[Binding, ...] = ()
    stale: str | None = None
    compilers: Sequence[Compiler] = ()
    no_compiler: Mapping[str, str] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    binding: str | None = None
    failures: Mapping[tuple[str, int, str, str], str] = field(default_factory=dict)
    cards: tuple[str, ...] = ()
    vendor: str = ""
    npu: Npu | None = None

    @property
    def gpus(self) -> tuple[Device, ...]:
        """Its devices but for the CPU."""
        return tuple(device for device in self.devices if device.platform != "cpu")


def capability(arch: str) -> tuple[int, int] | None:
    """(9, 0) of "sm_90" or "compute_90a"; None for anything else."""
    found = re.fullmatch(r"(?:sm|compute)_(\d+)(\d)[af]?", arch)
    return (int(found[1]), int(found[2])) if found else None


def strip_features(arch: str) -> tuple[str, tuple[str, ...]]:
    """("gfx942", ("sramecc+", "xnack-")) of "gfx942:sramecc+:xnack-"."""
    name, *features = arch.split(":")
    return name, tuple(features)
