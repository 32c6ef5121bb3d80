"""What a wheel serves under the newest torches of the index, which it may not know: the release, and a pre-release that
is newer. Each runs as a slim torch (toolchains/slim_torch.py), every op beside its results under the torch here."""

from __future__ import annotations

import contextlib
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from build_matrix.errors import BuildError, LoadError, PackageIndexError
from build_matrix.store import Store, archive
from build_matrix.toolchains import headers, package_index, slim_torch
from build_matrix.toolchains.pythons import Python


@dataclass(frozen=True)
class Found:
    """What was found under one torch. binding: exact, portable or reference; "" where nothing loaded, for `error`.
    calls: how many ran; different: those that gave other bits than under the torch here, or nothing. tried: whether
    that torch came at all; where it did not, nothing is known of the wheel."""

    torch: str
    binding: str
    calls: int
    different: tuple[str, ...] = ()
    error: str = ""
    tried: bool = True

    @property
    def well(self) -> bool:
        """Whether kernels serve there, with the same bits."""
        return self.binding in ("exact", "portable") and not self.different

    def __str__(self) -> str:
        if not self.tried:
            return f"torch {self.torch}: not tried: {self.error}"
        if self.error:
            return f"torch {self.torch}: nothing serves: {self.error}"
        same = f"{self.calls - len(self.different)} of {self.calls} calls give the same bits"
        told = f"; others: {', '.join(self.different)}" if self.different else ""
        return f"torch {self.torch}: the {self.binding} binding serves; {same}{told}"


def newest(python: Python, before: bool = True) -> list[str]:
    """The newest release of torch that the index has for this Python and has not yanked, and, with `before`, a newer
    pre-release (a nightly, a release candidate). Raises PackageIndexError where there is none at all, and where an
    index that may have a newer one does not answer."""
    known = sorted(_versions(python))
    releases = [version for version in known if not version.is_prerelease]
    found = releases[-1:]
    if before and known and known[-1] not in found:
        found.append(known[-1])
    if not found:
        raise PackageIndexError(f"no index of pip's configuration holds a torch for {python.tag}")
    return [str(version) for version in found]


def _versions(python: Python) -> set[Version]:
    found = set()
    for version, tag, _ in headers.listed(among=package_index.newest_of("torch")):
        if tag == python.tag:
            with contextlib.suppress(InvalidVersion):
                found.add(Version(version))
    return found


def unpack(wheel: Path, folder: Path) -> Path:
    """The wheel's files in `folder`, as pip would lay them. Raises BuildError for what is no wheel of apex."""
    try:
        with archive.wheel(wheel) as opened:
            if "apex/__init__.py" not in opened.namelist():
                raise BuildError(f"{wheel} holds no apex")
            opened.extractall(folder)
    except (zipfile.BadZipFile, OSError, archive.Refused) as error:
        raise BuildError(f"{wheel} cannot be read: {error}") from error
    return folder


def run(version: str, python: Python, installed: Path, expected: dict, store: Store) -> Found:
    """What `installed`, an unpacked wheel, serves under a torch. expected: slim_torch.wheel_values without one. Raises
    BuildError where that torch cannot be had."""
    try:
        kind, digests = slim_torch.wheel_values(version, python, installed, store)
    except LoadError as error:
        return Found(version, "", 0, error=str(error))
    different = tuple(key for key, wanted in expected.items() if digests.get(key) != wanted)
    return Found(version, kind, len(expected), different)


def report(found: list[Found]) -> list[dict]:
    """For a program: what each torch got."""
    return [{**asdict(one), "well": one.well} for one in found]
