"""Archives that others made: every member is looked at before one is read or a byte is written. Standard library alone.

Refused are absolute names and those that lead outside, two members of one name, a file that is another's folder, links
and devices, and more or larger members than the caller expects: sizes are bounded before anything is unpacked.
"""

from __future__ import annotations

import contextlib
import stat
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

REGULAR = (0, stat.S_IFREG)  # 0: whoever packed it said no type
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
ENCRYPTED = 1  # a bit of a zip member's flags


class Refused(ValueError):
    """An archive that is not to be unpacked; says which member, and why."""


@dataclass(frozen=True)
class Limits:
    """The most that is unpacked: members, bytes of one, and bytes of all."""

    members: int
    one: int
    total: int


@dataclass(frozen=True)
class Entry:
    """What an archive says of a member, before it is read. `kind` is its type as in st_mode, 0 where none is said."""

    name: str
    size: int
    kind: int = 0


WHEEL = Limits(20_000, 1 << 30, 4 << 30)  # of ours, or of another project in dist/
LISTED = Limits(60_000, 8 << 30, 32 << 30)  # of a wheel of torch as a whole, of which parts are read
OUTPUT = Limits(100_000, 2 << 30, 8 << 30)  # of the store: a slim torch is the largest


def check(entries: Iterable[Entry], limits: Limits) -> None:
    """Raises Refused for the first member that may not be unpacked; members that come later are not asked for."""
    files: set[str] = set()
    folders: set[str] = set()
    total = 0
    for count, entry in enumerate(entries, 1):
        if count > limits.members:
            raise Refused(f"it has more than {limits.members} members")
        if fault := _fault(entry.name):
            raise Refused(f"it holds {entry.name!r}: {fault}")
        total += entry.size
        if entry.size > limits.one or total > limits.total:
            raise Refused(
                f"it holds {entry.name!r}: with {entry.size} bytes it, or all up to it, is too large"
            )
        name = entry.name.rstrip("/")
        folder = entry.name.endswith("/") or entry.kind == stat.S_IFDIR
        if entry.kind not in (*REGULAR, *((stat.S_IFDIR,) if folder else ())):
            raise Refused(f"it holds {entry.name!r}, which is neither a file nor a folder")
        if name in files or (not folder and name in folders):
            raise Refused(f"it holds {name} twice")
        parents = {name[:at] for at, letter in enumerate(name) if letter == "/"}
        if clash := parents & files:
            raise Refused(f"it holds {entry.name!r} under {min(clash)}, which is a file")
        folders |= parents | ({name} if folder else set())
        if not folder:
            files.add(name)


def _fault(name: str) -> str:
    """Why a member may not be called so; empty where it may."""
    if name.startswith("/") or name[1:2] == ":":
        return "an absolute name"
    if "\\" in name or "\0" in name:
        return "a name that systems read differently"
    parts = name.removesuffix("/").split("/")
    if ".." in parts:
        return "a name that leads outside"
    return "no plain name" if "" in parts or "." in parts else ""


@contextlib.contextmanager
def wheel(path: Path, limits: Limits = WHEEL) -> Iterator[zipfile.ZipFile]:
    """The zip archive at `path`, all of whose members were checked. Raises Refused, and what zipfile raises for one
    that is damaged."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a FIFO would be waited for, /dev/zero read without end
            raise Refused("it is no regular file")
        opened = zipfile.ZipFile(path)
    except (FileNotFoundError, PermissionError):
        if path.is_symlink():
            raise Refused("it is a link that leads nowhere") from None
        raise
    except OSError as error:  # a link to itself; an archive whose beginning is cut
        raise Refused(error.strerror or str(error)) from None
    with opened:
        check_zip(opened.infolist(), limits)
        yield opened


def check_zip(members: Iterable[zipfile.ZipInfo], limits: Limits) -> None:
    """`check` of the members of a zip archive, and of how they are packed. Raises Refused."""
    members = list(members)
    for member in members:
        if member.header_offset < 0:
            raise Refused(f"its beginning is cut: {member.filename!r} would lie before it")
        if member.flag_bits & ENCRYPTED or member.compress_type not in METHODS:
            raise Refused(f"it holds {member.filename!r}, which is encrypted or packed in no usual way")
    # The name as it stands there: zipfile cuts it at a zero byte.
    check((Entry(m.orig_filename, m.file_size, stat.S_IFMT(m.external_attr >> 16)) for m in members), limits)


def unpack_tar(packed: Path, target: Path, limits: Limits = OUTPUT) -> None:
    """Unpacks a .tar.gz into the folder `target`. Raises Refused before anything is written, and what tarfile raises
    for one that is damaged."""
    with tarfile.open(packed, "r:gz") as archive:
        check(_entries(archive), limits)
        archive.extractall(target, filter="data")


def _entries(archive: tarfile.TarFile) -> Iterator[Entry]:
    for member in archive:
        kind = stat.S_IFDIR if member.isdir() else stat.S_IFREG if member.isreg() else stat.S_IFLNK
        if (member.name, kind) != (".", stat.S_IFDIR):
            yield Entry(member.name.removeprefix("./"), member.size, kind)
