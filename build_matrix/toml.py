"""Reads TOML on every Python of the matrix. 3.10 has no tomllib: there tomli serves, or the copy pip
carries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:
    try:
        import tomli as tomllib
    except ModuleNotFoundError:
        from pip._vendor import tomli as tomllib  # every environment that can build has pip


def read(path: Path) -> dict[str, Any]:
    """The parsed file. Raises FileNotFoundError, or TOMLDecodeError naming the line."""
    return tomllib.loads(path.read_text(encoding="utf-8"))
