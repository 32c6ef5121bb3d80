"""Reads TOML on every Python of the matrix. 3.10 has no tomllib: there tomli serves, or the copy pip
carries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from build_matrix.errors import BuildError

try:
    import tomllib
except ModuleNotFoundError:
    try:
        import tomli as tomllib
    except ModuleNotFoundError:
        from pip._vendor import tomli as tomllib  # every environment that can build has pip


def read(path: Path) -> dict[str, Any]:
    """The parsed file. Raises FileNotFoundError, or BuildError naming the line of what is no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BuildError(f"{path.name} is no TOML: {error}") from None
