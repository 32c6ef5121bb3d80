"""The machines that every kernel's test runs on, and the services behind them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from emulated.toolchain import ARCHES, why_not

from simt.build import FLAVOURS, SELFTEST, WARP_SIZES, build, sanitizer_preload
from simt.device import Device
from simt.executor import Executor
from simt.worker import Worker

ORDERS = {"ascending": 0, "descending": 1, "shuffled": 7}
SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


@dataclass(frozen=True)
class Target:
    """Where a test runs.

    Attributes:
        name: the test's id.
        flavour: a key of build.FLAVOURS, or "emulated".
        variant: warp size, or arch.
        order: see Device.
    """

    name: str
    flavour: str
    variant: int | str
    order: int

    @property
    def emulated(self) -> bool:
        return self.flavour == "emulated"

    @property
    def marks(self) -> list[str]:
        """The markers of a test that runs there."""
        if self.emulated:
            return ["emulated"]
        found = ["executor", *(["warp64"] if self.variant == 64 else [])]
        return [*found, *(["sanitized"] if self.flavour != "plain" else [])]

    def why_not(self) -> str:
        """Why this target cannot be used here; "" if it can."""
        return why_not() if self.emulated else ""

    def device(self, selftest: bool = False) -> Device:
        """A fresh device.

        Args:
            selftest: with the kernels of csrc/testing/selftest.cu in place of the product's.
        """
        return Device(_service(self.flavour, self.variant, selftest), self.name, self.order, self.emulated)


def executor_targets() -> list[Target]:
    """Every build, warp size and order of the executor."""
    return [
        Target(f"{flavour}-{width}-{name}", flavour, width, order)
        for flavour in FLAVOURS
        for width in WARP_SIZES
        for name, order in ORDERS.items()
    ]


def emulated_targets() -> list[Target]:
    """Every arch of the emulator, waves in order and waves in turns."""
    return [
        Target(f"emulated-{arch}-{name}", "emulated", arch, order)
        for arch in ARCHES
        for name, order in (("in_order", 0), ("in_turns", 1))
    ]


@functools.cache
def _service(flavour: str, variant: int | str, selftest: bool):
    """Services are kept: a library is loaded, a child started and an instruction compiled once a test run."""
    sources = [str(SELFTEST)] if selftest else None
    if flavour == "emulated":
        return Worker("emulated.service:Emulator", (variant, sources), {})
    if FLAVOURS[flavour].sanitized:
        build(flavour, variant, sources and [SELFTEST])  # here: the child's compiler would be preloaded too
        environment = {"LD_PRELOAD": sanitizer_preload(), **SANITIZER_OPTIONS}
        return Worker("simt.executor:Executor", (flavour, variant, sources), environment)
    return Executor(flavour, variant, sources)
