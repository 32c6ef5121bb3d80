"""The registry of extensions and the dispatcher schemas, as this installation holds them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from apex._loader import op_model, tree
from apex._loader.errors import InstallationError


@dataclass(frozen=True)
class Extension:
    """One import name of public apex, such as amp_C. `state` is "complete" or "planned".

    successor: what serves in the place of a planned one, or "".
    """

    name: str
    group: str
    ops: tuple[str, ...]
    state: str
    release: str | None
    successor: str = ""


@functools.cache
def extensions() -> dict[str, Extension]:
    """name -> Extension, in the registry's order; empty if this installation has no registry."""
    source, built = tree.registry_files()
    data = _toml(source) if source else None
    if data is None:
        data = tree.read_json(built) if built else {}
    rows = data if isinstance(data, list) else (data or {}).get("extension", [])
    return {row["name"]: _extension(row) for row in rows}


def _extension(row):
    return Extension(
        name=row["name"],
        group=row.get("group", ""),
        ops=tuple(row.get("ops", ())),
        state=row.get("state", "planned"),
        release=row.get("release"),
        successor=row.get("successor", ""),
    )


def _toml(path):
    """The parsed file, or None where no TOML reader is: Python 3.10 without tomli, whose wheels hold JSON."""
    try:
        import tomllib
    except ModuleNotFoundError:
        try:
            import tomli as tomllib
        except ModuleNotFoundError:
            return None
    return tomllib.loads(path.read_text(encoding="utf-8"))


@functools.cache
def schemas() -> dict[str, Any]:
    """op name -> op_model.Op, in the file's order."""
    path = tree.schemas()
    if path is None:
        from apex._loader import offers

        raise InstallationError(
            "apex is not whole: its list of ops is missing",
            wanted="ops.schemas",
            found=f"no such file in {tree.built()}",
            remedy=offers.reinstall(),
        )
    return op_model.parse(path.read_text(encoding="utf-8"))


def ops() -> tuple[str, ...]:
    """Names of the ops: a functional op has several schemas."""
    return tuple(dict.fromkeys(schema.unit for schema in schemas().values()))


@functools.cache
def units() -> tuple[str, ...]:
    """Names of the device sources: every op that has one, and helpers such as table kernels.

    A unit is what is compiled, packed and chosen; most bear the name of an op.
    """
    folder = tree.device_sources()
    if folder is None:
        return ops()
    return tuple(sorted(path.stem for path in folder.glob("*.cu")))
