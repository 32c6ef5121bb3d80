"""The registry of extensions and the dispatcher schemas, as this installation holds them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apex._loader import layout, op_model, remedies
from apex._loader.errors import InstallationError
from apex._loader.op_model import Op


@dataclass(frozen=True)
class Extension:
    """One import name of public apex, such as amp_C, and what makes it up, as csrc/extensions.toml says.

    state:         "complete", or "planned" for `release`, in whose place `successor` serves
    host_ops:      ops without a device source
    group, variable, option, aliases, minimum_torch: how a build from source asks for it, and what for
    """

    name: str
    group: str
    ops: tuple[str, ...]
    state: str
    release: str = ""
    successor: str = ""
    host_ops: tuple[str, ...] = ()
    variable: str = ""
    option: str = ""
    minimum_torch: str = ""
    aliases: tuple[str, ...] = ()


def extensions() -> dict[str, Extension]:
    """name -> Extension, in the registry's order; empty if this installation has no registry."""
    return _extensions(*layout.registry_files())


@functools.cache
def _extensions(source: Path | None, built: Path | None) -> dict[str, Extension]:
    data: Any = _toml(source) if source else None
    if data is None:
        data = layout.read_json(built, object) if built else {}
    rows = data.get("extension", []) if isinstance(data, dict) else data
    try:
        return {row["name"]: of_table(row) for row in rows}
    except (KeyError, TypeError, AttributeError):  # damaged: installed.damage() says so
        return {}


def of_table(row: Mapping[str, Any]) -> Extension:
    """The Extension of a table of the file. Raises TypeError for a field that is unknown or missing."""
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
    return Extension(**values)


def _toml(path: Path) -> dict[str, Any] | None:
    """The parsed file, or None where no TOML reader is: Python 3.10 without tomli, whose wheels hold JSON."""
    try:
        import tomllib
    except ModuleNotFoundError:
        try:
            import tomli as tomllib
        except ModuleNotFoundError:
            return None
    return tomllib.loads(path.read_text(encoding="utf-8"))


def schemas() -> dict[str, Op]:
    """op name -> op_model.Op, in the file's order. Raises InstallationError where the file is missing or damaged."""
    return _schemas(layout.schemas())


@functools.cache
def _schemas(path: Path | None) -> dict[str, Op]:
    try:
        if path is not None:
            return op_model.parse(layout.read_bytes(path).decode("utf-8"))
        fault, found = "missing", f"no such file in {layout.built()}"
    except (OSError, ValueError) as error:
        fault, found = "damaged", str(error)
    if not layout.PACKAGE.is_dir():
        raise InstallationError(
            "apex is imported from an archive, whose libraries and data files cannot be opened",
            found=str(layout.PACKAGE),
            remedy="unpack the archive, and put the folder that holds `apex` on sys.path",
        )
    raise InstallationError(
        f"apex is not whole: its list of ops is {fault}",
        wanted="ops.schemas",
        found=found,
        remedy=remedies.reinstall(),
    )


def ops() -> tuple[str, ...]:
    """Names of the ops: a functional op has several schemas."""
    return tuple(dict.fromkeys(schema.unit for schema in schemas().values()))


def kernel_ops() -> tuple[str, ...]:
    """Those that have variants to choose from: all but the ones that libapex runs by libraries of the vendor."""
    host = {op for extension in extensions().values() for op in extension.host_ops}
    return tuple(op for op in ops() if op not in host)


def units() -> tuple[str, ...]:
    """Names of the device sources: every op that has one, and helpers such as table kernels.

    A unit is what is compiled, packed and chosen; most bear the name of an op.
    """
    folder = layout.device_sources()
    return ops() if folder is None else _units(folder)


@functools.cache
def _units(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in folder.glob("*.cu")))
