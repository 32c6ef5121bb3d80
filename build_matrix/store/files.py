"""Files of a checkout: which are outputs, writing one so that nobody reads half of it, and folders that live as long as
a block. Standard library alone."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from build_matrix.errors import RequirementMissing

OUTPUTS = (".pyc", ".so", ".o")  # what builds leave among the sources: never an input


def write(path: Path, text: str) -> None:
    """Writes by way of another name beside it: who reads, or comes after a kill, finds the old text or the new. Of two
    at once the last one stays, whole."""
    with beside(path) as partial:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)


@contextlib.contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A new empty file in the folder of `path` for the time of a block, which fills it and renames it to `path`. Nobody
    else has its name, and its mode is any new file's. Those that killed processes left for `path` go first: who is
    alive holds a lock on its own."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 16}.partial"):
        with contextlib.suppress(OSError), _held(left, os.O_RDWR):  # of another user, or in use
            left.unlink()
    while True:
        partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
        opened = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        with contextlib.suppress(
            OSError
        ):  # a file system without locks: then nobody else can hold one either
            fcntl.flock(opened, fcntl.LOCK_EX)
        if os.fstat(opened).st_nlink:  # else somebody swept it away before it was locked
            break
        os.close(opened)
    try:
        yield partial
    finally:
        partial.unlink(missing_ok=True)
        os.close(opened)


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
def _held(place: Path, how: int = os.O_RDONLY | os.O_DIRECTORY) -> Iterator[None]:
    """The lock of a folder, or of a file. Raises OSError where somebody else holds it."""
    opened = os.open(place, how | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(opened)
