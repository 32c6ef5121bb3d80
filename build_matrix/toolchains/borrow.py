"""Lends the packages of this interpreter to a virtual environment: a folder of links on its path.

Only the named distributions and what they require are seen there, so the environment is clean but for them,
and pip counts them as installed and cannot remove them.
"""

from __future__ import annotations

import importlib.metadata
import os
import secrets
from pathlib import Path

from packaging.requirements import Requirement


def closure(names: list[str]) -> dict[str, importlib.metadata.Distribution]:
    """`names` and what they require here. Raises PackageNotFoundError for a name that is not installed."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = [Requirement(name) for name in names]
    while waiting:
        requirement = waiting.pop()
        key = requirement.name.lower().replace("_", "-")
        if key in found:
            continue
        distribution = _fitting(requirement)
        if distribution is None:
            if requirement.name in names:
                raise importlib.metadata.PackageNotFoundError(requirement.name)
            continue  # torch runs here without it
        found[key] = distribution
        wanted = [Requirement(text) for text in distribution.requires or []]
        waiting += [r for r in wanted if not r.marker or r.marker.evaluate({"extra": ""})]
    return found


def _fitting(requirement: Requirement) -> importlib.metadata.Distribution | None:
    """The first on sys.path whose version will do: an environment may hold an old one before the good one."""
    for distribution in importlib.metadata.distributions(name=requirement.name):
        if requirement.specifier.contains(distribution.version, prereleases=True):
            return distribution
    return None


def top_level(distribution: importlib.metadata.Distribution) -> dict[str, Path]:
    """The first path components that a distribution owns in site-packages, its dist-info among them."""
    found = {}
    for file in distribution.files or []:
        if file.parts[0] not in ("..", "__pycache__") and not file.is_absolute():
            found[file.parts[0]] = Path(str(distribution.locate_file(file.parts[0])))
    return found


def link(place: Path, target: Path) -> None:
    """Makes `place` a link to `target`, whatever link is there: to a package that is gone, or lies elsewhere now. By
    rename, as two may do it at once."""
    if place.is_symlink() and os.readlink(place) == str(target):
        return
    partial = place.with_name(f".{place.name}-{secrets.token_hex(8)}")
    partial.symlink_to(target)
    try:
        partial.replace(place)
    except OSError:
        partial.unlink()
        raise


def lend(names: list[str], environment: Path) -> list[str]:
    """Makes `names` importable in the virtual environment. Returns what was lent, `torch 2.13.0+cpu` and so
    on."""
    (site,) = environment.glob("lib/python3.*/site-packages")
    folder = environment / "borrowed"
    folder.mkdir(exist_ok=True)
    lent = []
    for distribution in closure(names).values():
        for name, path in top_level(distribution).items():
            link(folder / name, path)
        lent.append(f"{distribution.metadata['Name']} {distribution.version}")
    (site / "borrowed.pth").write_text(f"{folder}\n")
    return sorted(lent)
