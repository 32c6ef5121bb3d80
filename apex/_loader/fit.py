"""Which binding serves a described machine: pure comparisons, no import of torch.

A release of PyTorch is matched by its minor, as its symbols do not change within one. Pre-releases,
nightlies, vendor alphas and local builds carry a release's number with other symbols: they match by git
version alone.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

from apex._loader.environment import BINDING
from apex._loader.machine import VERSION, Binding, Machine, Torch

OLDEST_TORCH = (2, 8)

# Labels that PyTorch's own index gives to builds of a release. Anything else after the + is somebody's own
# build.
_RELEASE_LABEL = re.compile(r"(?:cpu|xpu|cu\d+|rocm\d+(?:\.\d+)*)(?:\.cxx11\.abi|\.with\.pypi\.cudnn)?")


@dataclass(frozen=True)
class Fit:
    """Whether a binding serves. `library`: 3a may be loaded; `module`: 3b too; `reason`: why, or why not;
    `stale`: what is built is older than the sources it lies in; `portable`: the portable binding serves instead."""

    binding: Binding | None
    library: bool
    module: bool
    reason: str
    stale: bool = False
    portable: bool = False

    @property
    def kind(self) -> str:
        """What serves: "exact", "portable" or "reference"."""
        return "exact" if self.library else "portable" if self.portable else "reference"

    @property
    def words(self) -> str:
        """The same as a person reads it."""
        return f"portable: {self.reason}" if self.kind == "portable" else self.reason


def not_a_release(version: str) -> str | None:
    """Why a torch version string is not a release of PyTorch, in words; None if it is one.

    Only a release can be matched by its minor: alphas, nightlies and local builds have other symbols.
    """
    found = VERSION.fullmatch(version)
    if found is None:
        return f"the version {version!r} cannot be read"
    if found["pre"]:
        return f"{version} is a pre-release"
    if found["local"] and not _RELEASE_LABEL.fullmatch(found["local"]):
        return f"{version} is somebody's own build (label +{found['local']})"
    return None


def match(torch: Torch, python: str, binding: Binding) -> Fit:
    """Whether `binding` serves this torch and python tag ("cp311"); a Fit. Pure."""
    same_build = _known(torch.git_version) and torch.git_version == binding.git_version
    if torch.minor != binding.torch:
        return _no(binding, f"built for torch {binding.torch}, running {torch.version}")
    if torch.cxx11_abi != binding.cxx11_abi:
        built, runs = _abi(binding.cxx11_abi), _abi(torch.cxx11_abi)
        return _no(binding, f"built with the {built} C++ ABI, torch {torch.version} has the {runs} one")
    if not same_build:
        foreign = not_a_release(torch.version)
        if foreign:
            return _no(
                binding, f"{foreign}, and its git version is not the one that the binding was built from"
            )
        unofficial = not_a_release(binding.built_against or binding.torch)
        if unofficial:
            return _no(binding, f"the binding was built against something that is no release: {unofficial}")
    how = "same build of torch" if same_build else f"same release series {binding.torch}"
    if binding.python is None:
        return Fit(binding, True, False, f"{how}; it has no Python module")
    if binding.python != python:
        return Fit(
            binding, True, False, f"{how}; its Python module is for {binding.python}, this Python is {python}"
        )
    return Fit(binding, True, True, how)


def _no(binding: Binding, reason: str) -> Fit:
    return Fit(binding, False, False, reason)


def _known(git_version: str | None) -> bool:
    return bool(git_version) and git_version != "Unknown"


def _abi(flag: bool) -> str:
    return "C++11" if flag else "pre-C++11"


def fit(machine: Machine) -> Fit | None:
    """Which binding serves a described machine; None where it has no torch. Pure.

    A whole one is best, then 3a alone, then the portable binding, which takes any torch but an old one. Else the Fit's
    reason speaks for all. APEX_BINDING takes away all but the one that it names.
    """
    torch, forced = machine.torch, machine.env.get(BINDING, "").lower()
    if torch is None:
        return None
    found = _best(torch, machine.python, () if forced in ("portable", "reference") else machine.bindings)
    serves = machine.portable is None and forced not in ("exact", "reference")
    if serves and not found.library and not is_older(torch.version, OLDEST_TORCH):
        found = dataclasses.replace(found, portable=True)
    if machine.stale and found.kind != "reference":
        return Fit(None, False, False, machine.stale, stale=True)
    return dataclasses.replace(found, reason=f"{BINDING}={forced}") if forced == found.kind else found


def is_older(version: str, oldest: tuple[int, int]) -> bool:
    """Whether a version of torch, "2.7.1+cu128", is older than a pair of numbers; no for one that cannot be read."""
    numbers = re.findall(r"\d+", version)
    return bool(numbers) and tuple(int(number) for number in (*numbers, "0")[:2]) < oldest


def _best(torch: Torch, python: str, bindings: Sequence[Binding]) -> Fit:
    fits = [match(torch, python, binding) for binding in bindings]
    whole = [fit for fit in fits if fit.module]
    if serving := [*whole, *(fit for fit in fits if fit.library)]:
        return serving[0]
    if not fits:
        return Fit(None, False, False, "this installation has no compiled bindings")
    near = [fit for fit in fits if fit.binding and fit.binding.torch == torch.minor]
    if near:
        return Fit(None, False, False, near[0].reason)
    have = ", ".join(sorted({binding.torch for binding in bindings}, key=_order))
    return Fit(None, False, False, f"built for torch {have}, running {torch.version}")


def _order(minor: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", minor))
