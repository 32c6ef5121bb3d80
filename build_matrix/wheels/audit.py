"""auditwheel's verdict on a wheel, with torch's libraries excluded: they come with torch, never in our
wheels."""

from __future__ import annotations

import importlib.metadata
import logging
from functools import cache
from pathlib import Path

from build_matrix.errors import GateError

EXCLUDED = frozenset(
    ["libc10*.so*", "libtorch*.so*", "libcuda*.so*", "libcudart*.so*", "libamdhip64*.so*", "libhip*.so*"]
)
WANTED = (2, 28)  # newest manylinux that a wheel may ask for


@cache
def version() -> str:
    """auditwheel's own version: its verdict goes into a wheel's key."""
    return importlib.metadata.version("auditwheel")


def platform_tag(wheel: Path) -> str:
    """manylinux_2_27_x86_64, say: the oldest platform the wheel runs on. Raises GateError when it is newer
    than manylinux_2_28, or when the wheel needs a library that no manylinux machine has."""
    from auditwheel.wheel_abi import analyze_wheel_abi
    from auditwheel.wheeltools import get_wheel_architecture

    logging.getLogger("auditwheel").setLevel(
        logging.ERROR
    )  # it warns of every device ELF that it passes over
    verdict = analyze_wheel_abi(
        None,  # the C library is found out from what the libraries need
        get_wheel_architecture(wheel.name),
        wheel,
        EXCLUDED,
        disable_isa_ext_check=True,  # CPU variants above the baseline are chosen by cpuid
        allow_graft=False,
    )
    name = verdict.overall_policy.name
    parts = name.split("_")
    if parts[0] != "manylinux" or (int(parts[1]), int(parts[2])) > WANTED:
        raise GateError(
            wheel.name, [f"auditwheel calls it {name}; manylinux_{WANTED[0]}_{WANTED[1]} is the limit"]
        )
    return name
