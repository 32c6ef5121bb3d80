"""Reads TOML on every Python of the matrix. 3.10 has no tomllib: there tomli serves, or the copy pip
carries."""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from typing import Any

from build_matrix.errors import BuildError, NoToml

try:
    import tomllib
except ModuleNotFoundError:
    tomllib = None


def _reader() -> Any:
    """tomllib, tomli, or the copy in pip, installed or as ensurepip keeps it. Raises BuildError where none is."""
    if tomllib:
        return tomllib
    for name in ("tomli", "pip._vendor.tomli"):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    with contextlib.suppress(ModuleNotFoundError):
        import ensurepip

        folders = [Path(ensurepip.__file__).parent / "_bundled", Path("/usr/share/python-wheels")]
        for wheel in [path for folder in folders for path in sorted(folder.glob("pip-*.whl"))]:
            sys.path.append(str(wheel))
            return importlib.import_module("pip._vendor.tomli")
    raise NoToml("this Python reads no TOML. Run: python -m pip install tomli")


def read(path: Path) -> dict[str, Any]:
    """The parsed file. Raises FileNotFoundError, or BuildError naming the line of what is no TOML."""
    try:
        return _reader().loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BuildError(f"{path.name} is no TOML: {error}") from None
