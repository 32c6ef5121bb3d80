"""What the vendors say runs where: arch families, PTX and toolkit versions against drivers.

Sources: CUDA C++ Programming Guide (binary and PTX compatibility), PTX ISA release notes (table of versions),
CUDA toolkit release notes (table of drivers), CUDA Compatibility (minor version compatibility), LLVM's AMDGPU
user guide (generic processors, code object versions).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Chips of the Tegra line have an arch number of their own; binary compatibility never crosses to or from
# them.
TEGRA = {(5, 3), (6, 2), (7, 2), (8, 7), (8, 8), (10, 1), (11, 0)}

# PTX ISA version -> first CUDA whose driver takes it. From 8.0 to 8.5 and from 9.0 on the minors agree.
_PTX_CUDA = {
    (6, 0): (9, 0), (6, 1): (9, 1), (6, 2): (9, 2), (6, 3): (10, 0), (6, 4): (10, 1), (6, 5): (10, 2),
    (7, 0): (11, 0), (7, 1): (11, 1), (7, 2): (11, 2), (7, 3): (11, 3), (7, 4): (11, 4), (7, 5): (11, 5),
    (7, 6): (11, 6), (7, 7): (11, 7), (7, 8): (11, 8), (8, 0): (12, 0), (8, 1): (12, 1), (8, 2): (12, 2),
    (8, 3): (12, 3), (8, 4): (12, 4), (8, 5): (12, 5), (8, 6): (12, 7), (8, 7): (12, 8), (8, 8): (12, 9),
}  # fmt: skip

# Branch of the NVIDIA driver -> CUDA that it serves.
_BRANCH_CUDA = {
    440: (10, 2), 450: (11, 0), 455: (11, 1), 460: (11, 2), 465: (11, 3), 470: (11, 4), 495: (11, 5),
    510: (11, 6), 515: (11, 7), 520: (11, 8), 525: (12, 0), 530: (12, 1), 535: (12, 2), 545: (12, 3),
    550: (12, 4), 555: (12, 5), 560: (12, 6), 565: (12, 7), 570: (12, 8), 575: (12, 9), 580: (13, 0),
    590: (13, 1),
}  # fmt: skip

# First CUDA toolkit, and so driver, that knows an arch.
_ARCH_CUDA = {
    (7, 0): (9, 0), (7, 2): (9, 2), (7, 5): (10, 0), (8, 0): (11, 0), (8, 6): (11, 1), (8, 7): (11, 4),
    (8, 9): (11, 8), (9, 0): (11, 8), (10, 0): (12, 8), (12, 0): (12, 8), (10, 1): (12, 8), (10, 3): (12, 9),
    (12, 1): (12, 9), (11, 0): (13, 0), (8, 8): (13, 0),
}  # fmt: skip

# Processors that a generic code object serves.
GENERIC = {
    "gfx9-generic": ("gfx900", "gfx902", "gfx904", "gfx906", "gfx909", "gfx90c"),
    "gfx9-4-generic": ("gfx940", "gfx941", "gfx942", "gfx950"),
    "gfx10-1-generic": ("gfx1010", "gfx1011", "gfx1012", "gfx1013"),
    "gfx10-3-generic": ("gfx1030", "gfx1031", "gfx1032", "gfx1033", "gfx1034", "gfx1035", "gfx1036"),
    "gfx11-generic": ("gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153"),
    "gfx12-generic": ("gfx1200", "gfx1201"),
}

# Code object version -> first ROCm whose runtime loads it. Version 6 came with the generic processors.
_CODE_OBJECT_ROCM = {4: (4, 1), 5: (5, 6), 6: (6, 3)}


def cubin_serves(built: tuple[int, int], device: tuple[int, int]) -> str | None:
    """Why a cubin for capability `built` cannot run on `device`; None if it can. Both are (major, minor)."""
    if built == device:
        return None
    if built[0] != device[0]:
        return f"a cubin serves its own major only ({built[0]}.x, the device is {_dotted(device)})"
    if built in TEGRA or device in TEGRA:
        return "binary code does not cross between Tegra and other chips"
    if built[1] > device[1]:
        return (
            f"a cubin for {_dotted(built)} needs that minor or a higher one, the device is {_dotted(device)}"
        )
    return None


def toolkit_fits_driver(toolkit: tuple[int, int] | None, driver: tuple[int, int] | None) -> str | None:
    """Why the driver cannot load a cubin of this toolkit; None if it can. CUDA as (major, minor)."""
    if toolkit is None or driver is None or toolkit[0] <= driver[0]:
        return None  # within a major, minor version compatibility holds
    return f"made by CUDA {_dotted(toolkit)}, this driver serves CUDA {_dotted(driver)}"


def ptx_needs(isa: tuple[int, int]) -> tuple[int, int]:
    """First CUDA whose driver compiles PTX of this ISA version; versions newer than the table follow its
    pattern."""
    return _PTX_CUDA.get(isa) or (isa[0] + 4, isa[1])


def ptx_of(toolkit: tuple[int, int]) -> tuple[int, int] | None:
    """PTX ISA version that a CUDA toolkit writes where none is asked for; None for one older than the table."""
    return max((isa for isa in _PTX_CUDA if ptx_needs(isa) <= toolkit), default=None)


def ptx_fits_driver(isa: tuple[int, int], driver: tuple[int, int] | None) -> str | None:
    """Why the driver cannot compile PTX of ISA version `isa`; None if it can."""
    needed = ptx_needs(isa)
    if driver is None or needed <= driver:
        return None
    return f"PTX {_dotted(isa)} needs a driver for CUDA {_dotted(needed)}, this one serves {_dotted(driver)}"


def driver_knows(device: tuple[int, int] | None, driver: tuple[int, int] | None) -> str | None:
    """Why the driver does not know this device at all; None if it does, or if the table has no word on it."""
    needed = _ARCH_CUDA.get(device) if device else None
    if device is None or needed is None or driver is None or needed <= driver:
        return None
    return (
        f"a device {_dotted(device)} needs a driver for CUDA {_dotted(needed)}, this serves {_dotted(driver)}"
    )


def cuda_of_driver(text: str) -> tuple[int, int] | None:
    """CUDA version of a driver given as branch or version ("550", "550.54.15") or as CUDA version ("12.4").

    A branch that the table lacks counts as the next lower one it has. Raises ValueError on anything else.
    """
    numbers = [int(part) for part in re.findall(r"\d+", text)]
    if not numbers or not re.fullmatch(r"[rR]?\d+(\.\d+)*", text):
        raise ValueError(
            f"not a driver version: {text!r} (give a branch such as 550, or a CUDA version such as 12.4)"
        )
    if numbers[0] < 100:
        return (numbers[0], numbers[1] if len(numbers) > 1 else 0)
    known = [branch for branch in _BRANCH_CUDA if branch <= numbers[0]]
    if not known:
        raise ValueError(f"driver {text} is older than any that serves CUDA 10.2")
    return _BRANCH_CUDA[max(known)]


def nvrtc_archs(version: tuple[int, int]) -> tuple[str, ...]:
    """Archs that NVRTC of a CUDA version knows, for a machine whose NVRTC cannot be asked.

    Read from nvrtcGetSupportedArchs of 12.8 and 13.0; other versions by the toolkits' release notes.
    """
    oldest = (7, 5) if version >= (13, 0) else (5, 0)
    known = [arch for arch, since in _ARCH_CUDA.items() if oldest <= arch and since <= version]
    if version >= (13, 0):
        known.remove((10, 1))  # renamed to 11.0
    return tuple(f"sm_{major}{minor}" for major, minor in sorted(known))


def code_object_fits_runtime(version: int | None, rocm: tuple[int, int] | None) -> str | None:
    """Why the HIP runtime cannot load code objects of this version; None if it can, or nobody knows."""
    needed = None if version is None else _CODE_OBJECT_ROCM.get(version)
    if needed is None or rocm is None or needed <= rocm:
        return None
    return f"code object version {version} needs ROCm {_dotted(needed)}, this runtime is {_dotted(rocm)}"


def features_fit(wanted: tuple[str, ...], device: Iterable[str]) -> str | None:
    """Why a code object that insists on settings (("xnack-",)) cannot run where the device has others; else
    None."""
    have = {feature[:-1]: feature[-1] for feature in device}
    for feature in wanted:
        name, sign = feature[:-1], feature[-1]
        if have.get(name, sign) != sign:
            return f"built for {name}{sign}, the device has {name}{have[name]}"
    return None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
