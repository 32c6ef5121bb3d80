"""Where the parts of this installation lie.

An installed wheel holds everything inside `apex/`. In a source checkout the built parts are under
`build/tree/apex/` (the environment variable APEX_TREE names another folder that holds `apex/`) and the
sources are in `csrc/`.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, TypeVar

from apex._loader import system

T = TypeVar("T")

PACKAGE = Path(__file__).resolve().parent.parent


def checkout() -> Path | None:
    """Root of the source checkout this package runs from, or None for an installed wheel."""
    root = PACKAGE.parent
    return root if os.path.isfile(root / "csrc" / "extensions.toml") else None


def built() -> Path:
    """The folder that holds `lib/`, `packs/` and the built data files."""
    named = os.environ.get("APEX_TREE")
    if named:
        return Path(os.path.expanduser(named)) / "apex"
    root = checkout()
    return root / "build" / "tree" / "apex" if root else PACKAGE


def _first(*candidates: Path | None) -> Path | None:
    for path in candidates:
        if path is not None and os.path.exists(
            path
        ):  # Path.exists raises where the folder may not be searched
            return path
    return None


def _source(*parts: str) -> Path | None:
    root = checkout()
    return root.joinpath("csrc", *parts) if root else None


def libraries() -> Path:
    """Folder of the host library, bindings.json and the folders of the bindings; it need not exist."""
    return built() / "lib"


def packs() -> Path:
    """Folder of the kernel packs, one folder an arch; it need not exist."""
    return built() / "packs"


def device_sources() -> Path | None:
    """Folder of the device sources (*.cu, *.h), or None."""
    return _first(built() / "device", _source("device"), PACKAGE / "device")


def schemas() -> Path | None:
    """The file of dispatcher schemas, or None. A checkout's own file goes with its Python code."""
    return _first(_source("ops.schemas"), built_schemas())


def built_schemas() -> Path | None:
    """The file of dispatcher schemas that the bindings were compiled from, or None."""
    return _first(built() / "ops.schemas")


def registry_files() -> tuple[Path | None, Path | None]:
    """(extensions.toml or None, extensions.json or None)"""
    built_json = _first(built() / "extensions.json", PACKAGE / "extensions.json")
    return _first(_source("extensions.toml")), built_json


def build_facts() -> dict[str, Any]:
    """What the build wrote about itself (build.json): version, local label, toolchains; {} without one."""
    return read_json(built() / "build.json", dict) or {}


def version() -> str:
    """The version of this installation, such as "1.10.0+cu130"; a checkout has no local label."""
    facts = build_facts()
    found, local = facts.get("version"), facts.get("local")
    if found:
        return f"{found}+{local}" if local and "+" not in found else found
    root = checkout()
    try:
        text = read_bytes(root / "version.txt").decode("utf-8").strip() if root else ""
    except (OSError, ValueError):
        text = ""
    return text or "0+unknown"


def read_bytes(path: Path) -> bytes:
    """What a regular file holds. Raises OSError, for a FIFO, a device or a folder too: none of them is waited for."""
    with open(os.open(path, system.flags_to_read()), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(0, "it is no regular file", str(path))
        return file.read()


def read_json(path: Path, kind: type[T]) -> T | None:
    """The parsed file, or None if it is absent, is not JSON, or holds something else than a `kind` (dict, list)."""
    try:
        found = json.loads(read_bytes(path).decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, kind) else None
