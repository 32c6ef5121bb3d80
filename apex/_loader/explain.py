"""`python -m apex explain`: a machine written down on the command line."""

from __future__ import annotations

import re
from importlib import metadata

from apex._loader import bindings, compatibility, packs, registry, tree
from apex._loader.fit import Torch
from apex._loader.machine import Compiler, Device, Machine, capability, cpu_device, strip_features


def machine(archs, driver=None, torch=None, python=None):
    """The Machine that the arguments describe, with what this installation holds.

    archs:  "sm_120", "gfx942:xnack-", "cpu"
    driver: NVIDIA branch or version ("550", "550.54.15") or the CUDA version that it serves ("12.4")
    torch:  "2.14" or "2.14.0+cu130"; the label tells which NVRTC or hipRTC comes with it; default: the release
            that is installed here, if any, of whichever label
    python: "cp312", "3.12"
    Raises ValueError for an argument that cannot be read.
    """
    torch = torch or _installed_torch()
    described = _torch(torch) if torch else None
    from apex._loader import library

    return Machine(
        torch=described,
        python=_python(python),
        devices=tuple(_device(arch, index) for index, arch in enumerate(archs or ["cpu"])),
        cuda_driver=compatibility.cuda_of_driver(driver) if driver else None,
        hip_runtime=_pair(described.hip) if described and described.hip else None,
        cpu_level=3,
        cpu_units=library.cpu_units(),
        library=library.fault(),
        packs=packs.installed(),
        bindings=bindings.installed(),
        compilers=_compilers(described),
        no_compiler=_no_compiler(described),
        sources=registry.units() if tree.device_sources() else (),
    )


def _device(text, index):
    arch, features = strip_features(text)
    if arch == "cpu":
        return cpu_device(3)
    if capability(arch) and arch.startswith("sm_"):
        return Device("cuda", index, arch)
    if re.fullmatch(r"gfx[0-9a-f]+", arch):
        return Device("hip", index, arch, features=features)
    raise ValueError(f"not an arch: {text!r} (such as sm_120, gfx942 or cpu)")


def _installed_torch():
    try:
        return metadata.version("torch").partition("+")[0]  # another machine has a build of its own
    except metadata.PackageNotFoundError:
        return None


def _torch(text):
    """A Torch of a version that may lack its last number or label."""
    found = re.fullmatch(r"(\d+\.\d+)(\.\d+)?([^+]*)(?:\+(.+))?", text)
    if not found:
        raise ValueError(f"not a version of torch: {text!r} (such as 2.14 or 2.14.0+cu130)")
    local = found[4] or ""
    version = f"{found[1]}{found[2] or '.0'}{found[3]}" + (f"+{local}" if local else "")
    cuda = re.fullmatch(r"cu(\d+)(\d)", local)
    hip = re.fullmatch(r"rocm(\d+(?:\.\d+)+)", local)
    return Torch(version, cuda=f"{cuda[1]}.{cuda[2]}" if cuda else None, hip=hip[1] if hip else None)


def _python(text):
    if text is None:
        return bindings.python_tag()
    found = re.fullmatch(r"(?:cp)?(\d)\.?(\d+)(t?)", text)
    if not found:
        raise ValueError(f"not a Python: {text!r} (such as cp312 or 3.12)")
    return f"cp{found[1]}{found[2]}{found[3]}"


def _pair(text):
    numbers = re.findall(r"\d+", text)
    return (int(numbers[0]), int(numbers[1]))


def _compilers(torch):
    if torch and torch.cuda:
        version = _pair(torch.cuda)
        return (Compiler("cuda", version, compatibility.nvrtc_archs(version)),)
    if torch and torch.hip:
        return (Compiler("rocm", _pair(torch.hip)),)
    return ()


def _no_compiler(torch):
    hint = "give the build, as in --torch {}".format(
        f"{torch.version.split('+')[0]}+cu130" if torch else "2.14.0+cu130"
    )
    return {
        "cuda": f"not known which NVRTC comes with this torch; {hint}",
        "rocm": "this torch is not for ROCm",
    }
