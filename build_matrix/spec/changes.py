"""The changelog of the registry and the matrix: release_notes/changes.toml.

Every entry names what it added and removed, so that all of them together are what the registry and the matrix hold
now. A change without an entry is found by comparing the two, without a history of commits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from build_matrix import REPOSITORY
from build_matrix.errors import BuildError, GateError
from build_matrix.spec import matrix, toml
from build_matrix.spec.registry import Registry

FILE = REPOSITORY / "release_notes/changes.toml"


@dataclass(frozen=True)
class Change:
    """An entry: the version that brings it, what a user gets, and what of `inventory` came and went."""

    version: str
    text: str
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


def inventory() -> set[str]:
    """All that the registry and the matrix offer, one line each."""
    axes, registry = matrix.load(), Registry.load()
    return {
        *(f"torch {release}" for release in axes.torch),
        *(f"Python {tag}" for tag in axes.python),
        *(f"Python {tag} where there is one" for tag in axes.optional_python),
        *(f"platform {platform.name}" for platform in axes.platforms),
        *(f"not torch {r.torch or 'any'} with Python {r.python or 'any'}" for r in axes.rules),
        *(f"wheel {a.distribution}+{a.label} in {', '.join(a.roots)}" for a in axes.accelerators),
        *(f"torch_npu {n.torch_npu} for CANN {n.cann}, torch {n.torch}" for n in axes.npu),
        *(f"pack {p.arch.name} by {', '.join(p.toolchains)}" for p in axes.packs),
        *(f"import name {e.name}, {e.state}" for e in registry.extensions),
        *(f"op {op}" for op in registry.ops()),
    }


def load(path: Path = FILE) -> list[Change]:
    """Every entry, oldest first. Raises BuildError for one that is not whole, or contradicts those before."""
    there: set[str] = set()
    found = []
    for table in toml.read(path).get("change", []) if path.is_file() else []:
        try:
            change = Change(**{k: tuple(v) if isinstance(v, list) else v for k, v in table.items()})
        except TypeError as error:
            raise BuildError(f"{path.name}: entry {table.get('text', '?')!r}: {error}") from None
        if not change.text.strip() or not (change.added or change.removed):
            raise BuildError(f"{path.name}: an entry of {change.version} says nothing, or names nothing")
        wrong = [*there.intersection(change.added), *set(change.removed).difference(there)]
        if wrong:
            raise BuildError(
                f"{path.name}: {change.text!r} adds what is there, or removes what is not: {wrong[0]}"
            )
        there = (there - set(change.removed)) | set(change.added)
        found.append(change)
    return found


def missing(changes: list[Change], have: set[str]) -> tuple[list[str], list[str]]:
    """What no entry adds though it is there, and what none removes though it is gone."""
    told: set[str] = set()
    for change in changes:
        told = (told - set(change.removed)) | set(change.added)
    return sorted(have - told), sorted(told - have)


def check(path: Path = FILE) -> None:
    """Raises GateError where the registry or the matrix changed and no entry says so."""
    new, gone = missing(load(path), inventory())
    if new or gone:
        faults = [*(f"new: {line}" for line in new), *(f"gone: {line}" for line in gone)]
        command = "write an entry: python -m build_matrix changelog 'what a user gets'"
        raise GateError(f"release_notes/{path.name}", [*faults, command])


def add(text: str, version: str, path: Path = FILE) -> Change:
    """Appends the entry of everything that no entry tells yet. Raises BuildError when there is nothing to tell, or
    `text` tells nothing: an entry without words would make the whole file unreadable."""
    if not text.strip() or not all(letter.isprintable() or letter.isspace() for letter in text):
        raise BuildError(f"{text!r} says nothing that can be written down: say what a user gets")
    new, gone = missing(load(path), inventory())
    change = Change(version, text, tuple(new), tuple(gone))
    if not new and not gone:
        raise BuildError("the registry and the matrix hold what the changelog says: no entry is needed")
    with path.open("a", encoding="utf-8") as file:
        file.write(_written(change))
    return change


def _written(change: Change) -> str:
    """JSON's strings are TOML's basic strings."""
    lines = ["", "[[change]]", f'version = "{change.version}"']
    lines.append(f"text = {json.dumps(change.text, ensure_ascii=False)}")
    for name in ("added", "removed"):
        if items := getattr(change, name):
            lines += [f"{name} = [", *(f"    {json.dumps(i, ensure_ascii=False)}," for i in items), "]"]
    return "\n".join(lines) + "\n"
