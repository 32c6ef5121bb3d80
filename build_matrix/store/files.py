"""Files of a checkout: which are outputs, and writing one so that nobody reads half of it. Standard library alone."""

from __future__ import annotations

from pathlib import Path

from build_matrix.errors import RequirementMissing

OUTPUTS = (".pyc", ".so", ".o")  # what builds leave among the sources: never an input


def write(path: Path, text: str) -> None:
    """Writes by way of a temporary name beside it: who reads, or comes after a kill, finds the old text or the new."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def lock(path: Path | str):
    """The filelock of a path. Imported here, as what only looks things up does without. Raises RequirementMissing."""
    try:
        from filelock import FileLock
    except ModuleNotFoundError:
        raise RequirementMissing("filelock", "a build", "python -m pip install filelock") from None
    return FileLock(path)
