"""matrix.toml, read: axes, rules, accelerators, packs and accepted spills."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from apex._loader import system
from apex._loader.release import Accelerator, NpuRow
from build_matrix import REPOSITORY
from build_matrix.errors import BuildError
from build_matrix.spec import toml
from build_matrix.spec.archs import Arch

FILE = REPOSITORY / "build_matrix/matrix.toml"
OPERATORS = (">=", "<=", "==", ">", "<")


NATIVE = "linux_x86_64"  # the platform that the farm runs on


@dataclass(frozen=True)
class Platform:
    """What wheels are built for. `toolchain` is the cross compiler; none for the machine's own compiler."""

    name: str  #: linux_aarch64
    accelerators: tuple[str, ...]  #: whose wheels there are
    baseline: str  #: -march
    toolchain: str = ""
    compiler: str = ""  #: the program of that toolchain
    package: str = ""  #: Debian's package of it
    reason: str = ""  #: why not every accelerator

    @property
    def machine(self) -> str:
        """aarch64, win_amd64: what the tags of its wheels end in."""
        return self.name.removeprefix("linux_")

    @property
    def windows(self) -> bool:
        """Whether its wheels are of no one Python: the library, packs and Python, without compiled bindings."""
        return self.name.startswith("win_")

    @property
    def library(self) -> str:
        """libapex.so, apex.dll."""
        return system.host_library(system.WINDOWS if self.windows else "linux")

    @property
    def suffix(self) -> str:
        """What the names of its work units end in; nothing for the farm's own platform."""
        return "" if self.name == NATIVE else f" {self.name}"


def platform_of(tag: str) -> str:
    """linux_aarch64 of the platform tag manylinux_2_28_aarch64; any of any, win_amd64 of win_amd64."""
    return (
        tag
        if tag == "any" or tag.startswith("win_")
        else "linux_" + re.sub(r"^(linux|manylinux_\d+_\d+|manylinux\d+)_", "", tag)
    )


@dataclass(frozen=True)
class PackRule:
    """Which toolchains may make the pack of an arch, best first."""

    arch: Arch
    toolchains: tuple[str, ...]
    emulated: bool = False  #: the emulated tier of the tests can run its machine code
    tested: bool = False  #: built wherever the tests run


@dataclass(frozen=True)
class Rule:
    """Rules out the cells that match every field it names."""

    reason: str
    torch: str = ""
    python: str = ""

    def forbids(self, torch: str, python: str) -> bool:
        """Whether it rules a (torch, Python) out."""
        return (not self.torch or _matches(torch, self.torch)) and (not self.python or python == self.python)


@dataclass(frozen=True)
class Matrix:
    """matrix.toml, as a whole."""

    torch: tuple[str, ...]
    python: tuple[str, ...]
    optional_python: tuple[str, ...]  #: built where an interpreter is found
    platforms: tuple[Platform, ...]
    rules: tuple[Rule, ...]
    accelerators: tuple[Accelerator, ...]
    packs: tuple[PackRule, ...]
    spills: tuple[dict, ...]
    kernels_of_a_vendor: tuple[dict, ...]  #: that the other vendor's packs need not have
    wheel_bytes: int  #: size budget of a wheel
    unit_bytes: dict[str, int]  #: size budget of an op's code on one arch, by its kind: cubin, ptx, hsaco
    unit_budgets: tuple[dict, ...]  #: of ops that may be larger
    npu: tuple[NpuRow, ...] = ()  #: which torch_npu goes with which CANN, torch and Python
    index: str = ""  #: the address that wheels recommend; empty where it is served nowhere yet

    def accelerator(self, name: str) -> Accelerator:
        """The accelerator of that name. Raises BuildError where there is none."""
        for accelerator in self.accelerators:
            if accelerator.name == name:
                return accelerator
        raise BuildError(
            f"no accelerator is called {name}; there are {', '.join(a.name for a in self.accelerators)}"
        )

    def compiled(self, accelerators: Iterable[str]) -> list[str]:
        """Those of some accelerators whose wheels hold compiled code."""
        return [name for name in accelerators if not self.accelerator(name).pure]

    def platform(self, name: str) -> Platform:
        """The platform of that name. Raises BuildError where there is none."""
        for platform in self.platforms:
            if platform.name == name:
                return platform
        raise BuildError(
            f"no wheel is built for {name}; there are {', '.join(p.name for p in self.platforms)}"
        )

    def pack(self, arch: str) -> PackRule:
        """How the pack of an arch is made. Raises BuildError where none is."""
        for rule in self.packs:
            if rule.arch.name == arch:
                return rule
        raise BuildError(
            f"no pack is made for {arch}; there are {', '.join(p.arch.name for p in self.packs)}"
        )

    def archs(self, accelerator: str) -> list[str]:
        """The archs whose packs go into the wheels of an accelerator; none for `cpu`."""
        return [rule.arch.name for rule in self.packs if rule.arch.vendor == accelerator]

    def tested(self) -> list[str]:
        """The archs whose packs are built wherever the tests run."""
        return [rule.arch.name for rule in self.packs if rule.tested]

    def cells(self) -> list[str]:
        """Where tests run: the CPU, and every arch that a card can have."""
        return ["cpu", *(p.arch.name for p in self.packs if p.arch.kind != "ptx" and not p.arch.generic)]

    def why_not(self, torch: str, python: str) -> str | None:
        """The reason why a binding (torch, python) is not built, or None."""
        return next((rule.reason for rule in self.rules if rule.forbids(torch, python)), None)

    def why_no_wheel(self, accelerator: str, platform: str) -> str | None:
        """The reason why a platform has no wheel of an accelerator, or None."""
        found = self.platform(platform)
        if self.accelerator(accelerator).name in found.accelerators:
            return None
        return f"no wheel apex-{accelerator} is built for {platform}: {found.reason}"

    def torch_for(self, python: str) -> list[str]:
        """The releases of torch that a wheel of that Python carries bindings for."""
        return [torch for torch in self.torch if not self.why_not(torch, python)]

    def python_for(self, torch: str) -> list[str]:
        """The Pythons whose wheel carries a binding for that release of torch."""
        return [python for python in self.python if not self.why_not(torch, python)]

    def unit_budget(self, op: str, arch: str) -> int:
        """Bytes that the code of an op may have on an arch."""
        own = next((budget for budget in self.unit_budgets if budget["op"] == op), {})
        kind = Arch(arch).kind
        return own.get(kind, self.unit_bytes[kind])

    def accepted_spills(self, op: str, arch: str) -> dict[str, int]:
        """Bytes of spills that are accepted on an arch, for each kernel of an op that has any."""
        accepted: dict[str, int] = {}
        for spill in self.spills:
            kernel = spill["kernel"]
            if kernel.startswith(op) and arch in spill["archs"]:
                accepted[kernel] = max(spill["bytes"], accepted.get(kernel, 0))
        return accepted

    def wants_kernel(self, kernel: str, arch: str) -> bool:
        """False for a kernel of the other vendor's packs alone."""
        of = {k["vendor"] for k in self.kernels_of_a_vendor if fnmatchcase(kernel, k["kernels"])}
        return not of or Arch(arch).vendor in of


def numbers(version: str) -> tuple[int, ...]:
    """(2, 13, 0) of `2.13.0+cu130`; what follows the numbers does not count."""
    parts = []
    for part in version.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


def minor(version: str) -> str:
    """2.13 of `2.13.0+cu130`: what a binding, or a series of a toolkit, is called by."""
    return ".".join(version.partition("+")[0].split(".")[:2])


def dotted(tag: str) -> str:
    """3.11 of cp311: as people and commands call a Python."""
    return f"{tag[2]}.{tag[3:]}"


def _matches(version: str, condition: str) -> bool:
    operator = next((o for o in OPERATORS if condition.startswith(o)), "==")
    wanted = numbers(condition.removeprefix(operator))
    have = numbers(version)[: len(wanted)]
    return {
        ">=": have >= wanted,
        "<=": have <= wanted,
        "==": have == wanted,
        ">": have > wanted,
        "<": have < wanted,
    }[operator]


def _platform(name: str, tables: list[dict]) -> Platform:
    (table,) = [table for table in tables if table["name"] == name]
    return Platform(
        **{key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    )


@cache
def load(path: Path = FILE) -> Matrix:
    """The matrix of a file; read once. Raises BuildError for one that is not whole."""
    data = toml.read(path)
    try:
        return _matrix(data)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        told = f"{type(error).__name__} {error}"
        raise BuildError(f"{path.name} is not whole: {told}. Run: git checkout {path.name}") from error


def _matrix(data: dict[str, Any]) -> Matrix:
    return Matrix(
        torch=tuple(data["axes"]["torch"]),
        python=tuple(data["axes"]["python"]),
        optional_python=tuple(data["axes"].get("optional_python", [])),
        platforms=tuple(_platform(name, data["platform"]) for name in data["axes"]["platform"]),
        rules=tuple(Rule(**rule) for rule in data.get("rule", [])),
        accelerators=tuple(
            Accelerator(a["name"], a["label"], tuple(a["roots"]), a.get("pure", False))
            for a in data["accelerator"]
        ),
        packs=tuple(
            PackRule(
                Arch(p["arch"]), tuple(p["toolchains"]), p.get("emulated", False), p.get("tested", False)
            )
            for p in data["pack"]
        ),
        spills=tuple(data.get("spill", [])),
        kernels_of_a_vendor=tuple(data.get("kernels_of_a_vendor", [])),
        wheel_bytes=data["budget"]["wheel_bytes"],
        unit_bytes=data["budget"]["unit_bytes"],
        unit_budgets=tuple(data["budget"]["unit"]),
        npu=tuple(NpuRow(**row | {"python": tuple(row["python"])}) for row in data["npu"]["rows"]),
        index=data.get("index", {}).get("url", ""),
    )
