"""Whether a compiled binding fits a build of torch: pure comparisons, no import of torch.

A release of PyTorch is matched by its minor, as its symbols do not change within one. Pre-releases,
nightlies, vendor alphas and local builds carry a release's number with other symbols: they match by git
version alone.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

OLDEST_TORCH = (2, 8)

# Labels that PyTorch's own index gives to builds of a release. Anything else after the + is somebody's own
# build.
_RELEASE_LABEL = re.compile(r"(?:cpu|xpu|cu\d+|rocm\d+(?:\.\d+)*)(?:\.cxx11\.abi|\.with\.pypi\.cudnn)?")
_VERSION = re.compile(
    r"(\d+)\.(\d+)(?:\.(\d+))?(?P<pre>(?:a|b|rc|\.?dev)\d*|)(?:\.?post\d+)?(?:\+(?P<local>.+))?"
)


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
    def minor(self):
        """ "2.13" of "2.13.0+cu130", or None if the version cannot be read."""
        found = _VERSION.fullmatch(self.version)
        return f"{int(found[1])}.{int(found[2])}" if found else None


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
    def kind(self):
        """What serves: "exact", "portable" or "reference"."""
        return "exact" if self.library else "portable" if self.portable else "reference"

    @property
    def words(self):
        """The same as a person reads it."""
        return f"portable: {self.reason}" if self.kind == "portable" else self.reason


def not_a_release(version):
    """Why a torch version string is not a release of PyTorch, in words; None if it is one.

    Only a release can be matched by its minor: alphas, nightlies and local builds have other symbols.
    """
    found = _VERSION.fullmatch(version)
    if found is None:
        return f"the version {version!r} cannot be read"
    if found["pre"]:
        return f"{version} is a pre-release"
    if found["local"] and not _RELEASE_LABEL.fullmatch(found["local"]):
        return f"{version} is somebody's own build (label +{found['local']})"
    return None


def match(torch, python, binding):
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


def _no(binding, reason):
    return Fit(binding, False, False, reason)


def _known(git_version):
    return bool(git_version) and git_version != "Unknown"


def _abi(flag):
    return "C++11" if flag else "pre-C++11"


def choose(torch, python, bindings, portable=False):
    """The best Fit over all bindings: a whole one, else 3a alone, else a Fit whose reason speaks for all.

    portable: whether there is a host library, which the portable binding needs; it takes any torch but an old one.
    """
    found = _best(torch, python, bindings)
    serves = portable and not found.library and not is_older(torch.version, OLDEST_TORCH)
    return dataclasses.replace(found, portable=True) if serves else found


def is_older(version, oldest):
    """Whether a version of torch, "2.7.1+cu128", is older than a pair of numbers; no for one that cannot be read."""
    numbers = re.findall(r"\d+", version)
    return bool(numbers) and tuple(int(number) for number in (*numbers, "0")[:2]) < oldest


def _best(torch, python, bindings):
    fits = [match(torch, python, binding) for binding in bindings]
    for good in (lambda fit: fit.module, lambda fit: fit.library):
        for fit in fits:
            if good(fit):
                return fit
    if not fits:
        return Fit(None, False, False, "this installation has no compiled bindings")
    near = [fit for fit in fits if fit.binding.torch == torch.minor]
    if near:
        return Fit(None, False, False, near[0].reason)
    have = ", ".join(sorted({binding.torch for binding in bindings}, key=_order))
    return Fit(None, False, False, f"built for torch {have}, running {torch.version}")


def _order(minor):
    return tuple(int(part) for part in re.findall(r"\d+", minor))
