"""Describes the machine that this process runs on (machine.py): what is installed, and what hardware is here.

Opens a driver only where torch has a GPU; what is absent never raises.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Set
from pathlib import Path

from apex._loader import drivers, environment, installed, jit, npu, system
from apex._loader.machine import Device, Machine, Torch, strip_features
from apex._loader.once import Once


def describe() -> Machine:
    """This machine, read now."""
    torch = _torch()
    level = _own_cpu_level()
    gpus = (torch and torch_devices()) or next(filter(None, (devices() for devices in _others)), ())
    described = Machine(
        torch=torch,
        python=environment.python_tag(),
        system=system.name(),
        devices=(*gpus, environment.cpu_device(level)),
        cuda_driver=drivers.cuda_version() if any(gpu.platform == "cuda" for gpu in gpus) else None,
        hip_runtime=drivers.hip_version() if any(gpu.platform == "hip" for gpu in gpus) else None,
        cpu_level=level,
        compilers=jit.Compilers(torch),
        no_compiler=jit.Absent(torch),
        env=environment.switches(),
        cards=cards(),
        npu=npu.here(),
    )
    return installed.on(described)


def for_bindings() -> Machine:
    """What the choice of a binding depends on, of this machine: no device is asked for."""
    described = Machine(
        torch=_torch(),
        python=environment.python_tag(),
        system=system.name(),
        env=environment.switches(),
        cards=cards(),
    )
    return installed.on_for_bindings(described)


@Once
def here() -> Machine:
    """`describe()`, once a process."""
    return describe()


_others: list[Callable[[], tuple[Device, ...]]] = []


def also_devices(devices: Callable[[], tuple[Device, ...]]) -> None:
    """Asks another framework for its GPUs where torch has none: JAX's, in its process.

    From then on torch counts once somebody has imported it, and is not imported to be asked: that takes seconds, and
    where it is broken off (a test's time is up) torch cannot be imported again in the same process.
    """
    if devices not in _others:
        _others.append(devices)
        here.forget()


def _torch() -> Torch | None:
    if _others and sys.modules.get("torch") is None:
        return None
    try:
        return environment.running_torch()
    except ImportError:
        return None


_LEVELS: tuple[tuple[int, set[str]], ...] = (  # the x86-64 psABI's levels, by the kernel's names of the flags
    (2, {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"}),
    (3, {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}),
    (4, {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
)


def cpu_level(flags: Set[str]) -> int:
    """x86-64 level, 1 to 4, of a processor with these flags (a set, as /proc/cpuinfo names them)."""
    return _reached((level, needed <= flags) for level, needed in _LEVELS)


def _reached(levels: Iterable[tuple[int, bool]]) -> int:
    """Of (level, whether the processor has what it adds), from below: the last before one that it has not."""
    reached = 1
    for level, has in levels:
        if not has:
            break
        reached = level
    return reached


def _own_cpu_level() -> int:
    if system.on_windows():
        return windows_cpu_level(_windows_has)
    if platform.machine() != "aarch64":
        return cpu_level(_cpu_flags())
    at_hwcap, sve = 16, 1 << 22  # <sys/auxv.h>, <asm/hwcap.h>
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    return 2 if getauxval(at_hwcap) & sve else 1


def _cpu_flags() -> set[str]:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("flags"):
                    return set(line.split(":", 1)[1].split())
    except OSError:
        pass
    return set()


# What Windows tells of a processor, by the numbers of IsProcessorFeaturePresent: SSE4.2, AVX2, AVX-512F. A processor of
# this kind that has the last has what else is of its level.
_WINDOWS_LEVELS = ((2, 38), (3, 40), (4, 41))


def windows_cpu_level(has: Callable[[int], bool]) -> int:
    """x86-64 level, 1 to 4, of a processor of which Windows says what it has."""
    return _reached((level, has(feature)) for level, feature in _WINDOWS_LEVELS)


def _windows_has(feature: int) -> bool:
    return bool(ctypes.WinDLL("kernel32").IsProcessorFeaturePresent(feature))  # type: ignore[attr-defined]


def cards(root: str | Path = "", platform: str = sys.platform) -> tuple[str, ...]:
    """Vendors whose drivers show a card here, by their device nodes, on Windows by the driver's library (root: the
    folder of them): torch does not tell of what it cannot use."""
    if system.on_windows(platform):
        folder = Path(root or os.path.join(os.environ.get("SYSTEMROOT", r"C:\Windows"), "System32"))
        return ("cuda",) if (folder / system.cuda_driver(platform)).is_file() else ()
    nodes = Path(root or "/dev")
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
