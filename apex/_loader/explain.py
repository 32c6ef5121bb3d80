"""A machine written down: on the command line of `python -m apex explain` and `compat`, or by a program."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from apex._loader import compatibility, environment, installed, npu
from apex._loader import system as systems
from apex._loader.machine import Compiler, Device, Machine, Npu, Torch, capability, strip_features

NOTHING = "libapex.so is not installed"
UNKNOWN = "unknown"  # the toolkit of a torch whose build nobody named


def machine(
    archs: Iterable[str],
    driver: str | None = None,
    torch: str | None = None,
    python: str | None = None,
    **more: Any,
) -> Machine:
    """The Machine that the arguments describe (`described`), with what this installation holds. torch: default: the
    release that is installed here, if any, of whichever label. Raises ValueError."""
    written = described(torch or _installed_torch(), archs or ["cpu"], driver=driver, python=python, **more)
    return installed.on(written)


# 2.14, 2.14.0+cu130, 2.8.0a0+5228986c39.nv25.6, 2.9.0.dev20260101: a line of pip may be made of it.
TORCH = re.compile(
    r"(\d+\.\d+)(\.\d+)?((?:\.?(?:a|b|rc|dev|post)\d*)*)(?:\+([a-z0-9]+(?:[._-][a-z0-9]+)*))?",
    re.ASCII | re.IGNORECASE,
)


def described(
    torch: Any,
    archs: Iterable[str] = (),
    *,
    cuda: str | None = None,
    rocm: str | None = None,
    driver: str | None = None,
    python: str | None = None,
    system: str | None = None,
    git_version: str | None = None,
    cann: str | None = None,
) -> Machine:
    """A Machine with nothing installed.

    torch:  "2.14" or "2.14.0+cu130", or None; the label tells which NVRTC or hipRTC comes with it
    archs:  of its devices: "sm_120", "gfx942:xnack-", "cpu", "npu"
    cuda, rocm: the toolkit that its torch is built for ("12.8"), where the label does not say
    driver: NVIDIA branch or version ("550", "550.54.15") or the CUDA version that it serves ("12.4")
    python: "cp312", "3.12"; default: this one
    system: "linux_aarch64"; default: this one
    git_version: what torch.version.git_version says there: a build that is no release is known by it
    cann:   "8.5.0", beside which torch_npu is to run
    Raises ValueError for an argument that cannot be read, and for two that contradict each other.
    """
    archs = list(archs)
    devices = tuple(_device(arch, index) for index, arch in enumerate(archs) if arch != npu.NAME)
    build = _torch(torch, cuda, rocm, git_version, {device.platform for device in devices}) if torch else None
    return Machine(
        torch=build,
        python=_python(python),
        system=system or systems.name(),
        devices=devices,
        cuda_driver=compatibility.cuda_of_driver(driver) if driver else None,
        hip_runtime=_pair(build.hip) if build else None,
        cpu_level=3,
        library=NOTHING,
        portable=NOTHING,
        compilers=_compilers(build),
        no_compiler=_no_compiler(build),
        npu=_npu(cann, npu.NAME in archs, build, devices),
    )


def _npu(cann: str | None, named: bool, torch: Torch | None, devices: Iterable[Device]) -> Npu | None:
    """The Npu that was asked about, by its CANN or as an arch."""
    if cann and not npu.VERSION.fullmatch(cann):
        raise ValueError(f"{cann!r} is no version of CANN; say 8.5.0")
    if not (cann or named):
        return None
    if (torch and (torch.cuda or torch.hip)) or any(device.platform != "cpu" for device in devices):
        raise ValueError("torch_npu runs beside a torch for the CPU: neither CUDA nor ROCm goes with CANN")
    return Npu(cann=cann or "")


def _device(text: str, index: int) -> Device:
    arch, features = strip_features(text)
    if arch == "cpu":
        return environment.cpu_device(3)
    if re.fullmatch(r"(sm|compute)_\d+", arch) and capability(arch):
        return Device("cuda", index, arch)
    if re.fullmatch(r"gfx[0-9a-f]+|gfx\d+(-\d+)?-generic", arch):
        return Device("hip", index, arch, features=features)
    raise ValueError(f"{text!r} is no arch; say sm_90 or gfx942, npu or cpu")


def _installed_torch() -> str | None:
    try:
        return metadata.version("torch").partition("+")[0]  # another machine has a build of its own
    except metadata.PackageNotFoundError:
        return None


def _torch(
    text: str, cuda: str | None, rocm: str | None, git_version: str | None, platforms: set[str]
) -> Torch:
    """A Torch of a version that may lack its last number or label. What its label leaves open is what was named, else
    some build for the cards."""
    found = TORCH.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} is no version of torch; say 2.14 or 2.14.0+cu130")
    if cuda and rocm:
        raise ValueError("a torch is built for CUDA or for ROCm, not for both")
    local = found[4] or ""
    version = f"{found[1]}{found[2] or '.0'}{found[3]}" + (f"+{local}" if local else "")
    of_cuda = re.match(r"cu(\d+)(\d)(?![\w])", local)
    of_hip = re.match(r"rocm(\d+(?:\.\d+)+)", local)
    said = {"cuda": f"{of_cuda[1]}.{of_cuda[2]}" if of_cuda else "", "rocm": of_hip[1] if of_hip else ""}
    for name, toolkit, value in (("cuda", "CUDA", cuda), ("rocm", "ROCm", rocm)):
        if value and not re.fullmatch(r"\d+(\.\d+)*", value):
            raise ValueError(f"{value!r} is no version of {toolkit}; say 13.0 or 7.2")
        if value and re.match(r"cu\d|rocm|cpu|xpu", local) and _pair(value) != _pair(said[name]):
            raise ValueError(f"torch {version} is not built for {toolkit} {value}: its label says +{local}")
        said[name] = said[name] or value or ""
    if not any(said.values()) and not re.match("cpu|xpu", local):
        said = {"cuda": UNKNOWN if "cuda" in platforms else "", "rocm": UNKNOWN if "hip" in platforms else ""}
    return Torch(version, git_version, cuda=said["cuda"] or None, hip=said["rocm"] or None)


def _python(text: str | None) -> str:
    if not text:
        return environment.python_tag()
    found = re.fullmatch(r"(?:cp)?(\d)\.?(\d+)(t?)", text)
    if not found:
        raise ValueError(f"{text!r} is no Python; say 3.12 or cp312")
    return f"cp{found[1]}{found[2]}{found[3]}"


def _pair(text: str | None) -> tuple[int, int] | None:
    """(13, 0) of "13.0"; (13, 0) of "13" too; None where no number is."""
    numbers = [int(number) for number in re.findall(r"\d+", text or "")]
    return (numbers[0], (*numbers, 0)[1]) if numbers else None


def _compilers(torch: Torch | None) -> tuple[Compiler, ...]:
    if torch and (version := _pair(torch.cuda)):
        return (Compiler("cuda", version, compatibility.nvrtc_archs(version)),)
    if torch and torch.hip:
        return (Compiler("rocm", _pair(torch.hip) or (0, 0)),)  # hipRTC compiles for any arch
    return ()


def _no_compiler(torch: Torch | None) -> dict[str, str]:
    hint = "give the build, as in --torch {}".format(
        f"{torch.version.split('+')[0]}+cu130" if torch else "2.14.0+cu130"
    )
    return {
        "cuda": f"not known which NVRTC comes with this torch; {hint}",
        "rocm": "this torch is not for ROCm",
    }
