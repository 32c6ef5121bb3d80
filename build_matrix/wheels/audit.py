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
WANTED = (2, 28)  # the manylinux of torch's own wheels, which ours run beside
TAG = f"manylinux_{WANTED[0]}_{WANTED[1]}"


@cache
def version() -> str:
    """auditwheel's own version and the tag: what its verdict comes to goes into a wheel's key."""
    return f"{importlib.metadata.version('auditwheel')} {TAG}"


def platform_tag(wheel: Path) -> str:
    """manylinux_2_28_x86_64, say: the tag of torch's wheels for that processor, so that whoever downloads both for
    another machine (pip download --platform) names one; pip takes no older tag for it. Raises GateError when the wheel
    needs a newer platform, or a library that no manylinux machine has."""
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
        raise GateError(wheel.name, [f"auditwheel calls it {name}; {TAG} is the limit"])
    return f"{TAG}_{'_'.join(parts[3:])}"
