"""Files of a checkout: which are outputs, writing one so that nobody reads half of it, and folders that live as long as
a block. Standard library alone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
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


@contextlib.contextmanager
def temporary(purpose: str, place: Path | None = None) -> Iterator[Path]:
    """A new folder for the time of a block, in `place` (default: the system's temporary folder). Those that killed
    processes left for the same purpose go first: who is alive holds a lock on its own."""
    place = place or Path(tempfile.gettempdir())
    for left in place.glob(f"apex-{purpose}-*.held"):
        with contextlib.suppress(OSError), _held(left):  # of another user, or in use
            shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f".apex-{purpose}-", suffix=".held", dir=place))
    with contextlib.ExitStack() as held:
        with contextlib.suppress(
            OSError
        ):  # a file system without locks: then nobody else can hold one either
            held.enter_context(_held(made))
        folder = made.rename(
            made.with_name(made.name.removeprefix("."))
        )  # from here on others see it: it is locked
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """The lock of a folder. Raises OSError where somebody else holds it."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(opened)
