"""Reads members of a zip archive on an HTTP server without fetching the archive.

One request for the end, one for the central directory, then one a run of neighbouring members: members are
sorted by offset and joined when the gap between them is small. A request a member would take minutes for a
torch wheel.
"""

from __future__ import annotations

import http.client
import re
import stat
import struct
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from build_matrix.errors import PackageIndexError
from build_matrix.store import archive
from build_matrix.toolchains import package_index

GAP = 64 * 1024  # fetching a gap is cheaper than another request up to about this size
END, CENTRAL, LOCAL = b"PK\5\6", b"PK\1\2", b"PK\3\4"
TAIL = 65536 + 22
DIRECTORY = 64 << 20  # bytes; that of a wheel of torch has two million


@dataclass(frozen=True)
class Member:
    """A row of the archive's central directory."""

    name: str
    method: int
    crc: int
    packed: int
    size: int
    offset: int
    flags: int
    kind: int

    def __post_init__(self) -> None:
        if self.flags & archive.ENCRYPTED or self.method not in archive.METHODS:
            raise archive.Refused(f"it holds {self.name!r}, which is encrypted or packed in no usual way")


class RangeZip:
    """An archive at `url`. `downloaded` counts the bytes that came over the wire, `requests` the requests. Raises
    PackageIndexError for one that is damaged, or holds a member that may not be unpacked (archive.py)."""

    def __init__(self, url: str):
        self.url = url
        self.downloaded = 0
        self.requests = 0
        tail, total = self._fetch(-TAIL, None)
        at = tail.rfind(END)
        if at < 0:
            raise PackageIndexError(f"{url} is not a zip archive")
        try:
            self.members = self._directory(tail, at, total - len(tail))
        except (struct.error, ValueError) as error:  # cut, or refused
            raise PackageIndexError(f"{url}: {error}") from None

    def _directory(self, tail: bytes, at: int, start: int) -> list[Member]:
        """The rows of the central directory, whose end lies in `tail` at `at`; `tail` begins at `start`."""
        _, _, _, count, size, offset, _ = struct.unpack_from("<HHHHIIH", tail, at + 4)
        if size > DIRECTORY:
            raise archive.Refused(f"its directory has {size} bytes")
        directory = tail[offset - start :] if offset >= start else self._fetch(offset, offset + size)[0]
        members = list(_members(directory, count))
        archive.check((archive.Entry(m.name, m.size, m.kind) for m in members), archive.LISTED)
        return members

    def _fetch(self, start: int, stop: int | None) -> tuple[bytes, int]:
        """(bytes start..stop, size of the whole file); a negative start counts from the end."""
        span = str(start) if stop is None else f"{start}-{stop - 1}"
        request = urllib.request.Request(
            self.url, headers={"Range": f"bytes={span}", "Accept-Encoding": "identity"}
        )
        try:
            with urllib.request.urlopen(
                request, timeout=package_index.TIMEOUT, context=package_index.tls()
            ) as answer:
                if answer.status != 206:
                    raise PackageIndexError(f"the server of {self.url} does not serve ranges of a file")
                data = answer.read((-start if stop is None else stop - start) + 1)  # no more than was asked
                first, last, total = map(int, re.findall(r"\d+", answer.headers["Content-Range"]))
        except (OSError, http.client.HTTPException, TypeError, ValueError) as error:
            raise PackageIndexError(f"{self.url}: {error}") from error
        wanted = (max(total + start, 0), total) if stop is None else (start, min(stop, total))
        if (first, last + 1) != wanted:
            raise PackageIndexError(f"{self.url}: bytes {first}-{last} came, not {wanted[0]}-{wanted[1] - 1}")
        if len(data) != last - first + 1:
            raise PackageIndexError(
                f"{self.url}: the download was cut, {len(data)} of {last - first + 1} bytes came"
            )
        self.downloaded += len(data)
        self.requests += 1
        return data, total

    def read(self, wanted: Callable[[str], bool], limits: archive.Limits) -> Iterator[tuple[str, bytes]]:
        """(name, contents) of every member whose name is wanted. Raises PackageIndexError when a CRC
        differs, or, before any is fetched, where they are more than `limits`."""
        chosen = sorted((m for m in self.members if wanted(m.name)), key=lambda member: member.offset)
        try:
            archive.check((archive.Entry(m.name, m.size) for m in chosen), limits)
        except archive.Refused as error:
            raise PackageIndexError(f"{self.url}: {error}") from None
        for run in _runs(chosen):
            # A local header is 30 bytes, the name and an extra field whose length only it knows: leave room.
            stop = run[-1].offset + 30 + len(run[-1].name.encode()) + 1024 + run[-1].packed
            data, _ = self._fetch(run[0].offset, stop)
            for member in run:
                yield member.name, _unpack(member, data, member.offset - run[0].offset)


def _members(directory: bytes, count: int) -> Iterator[Member]:
    at = 0
    for _ in range(count):
        if directory[at : at + 4] != CENTRAL:
            raise archive.Refused("its central directory is damaged")
        flags, method, _, _, crc, packed, size, name, extra, comment = struct.unpack_from(
            "<HHHHIIIHHH", directory, at + 8
        )
        attributes, offset = struct.unpack_from("<II", directory, at + 38)
        text = directory[at + 46 : at + 46 + name].decode()
        if 0xFFFFFFFF in (packed, size, offset):
            raise archive.Refused(f"{text} lies beyond 4 GiB of it")
        yield Member(text, method, crc, packed, size, offset, flags, stat.S_IFMT(attributes >> 16))
        at += 46 + name + extra + comment


def _runs(members: list[Member]) -> Iterator[list[Member]]:
    run: list[Member] = []
    end = 0
    for member in members:
        if run and member.offset - end > GAP:
            yield run
            run = []
        run.append(member)
        end = member.offset + 30 + len(member.name.encode()) + member.packed
    if run:
        yield run


def _unpack(member: Member, data: bytes, at: int) -> bytes:
    if data[at : at + 4] != LOCAL or at + 30 > len(data):
        raise PackageIndexError(f"{member.name}: its local header is damaged")
    name, extra = struct.unpack_from("<HH", data, at + 26)
    if data[at + 30 : at + 30 + name] != member.name.encode():
        raise PackageIndexError(f"{member.name}: its local header names another")
    start = at + 30 + name + extra
    packed = data[start : start + member.packed]
    try:
        # What it would unpack to beyond the size that it states is not unpacked.
        contents = (
            zlib.decompressobj(-15).decompress(packed, member.size + 1) if member.method == 8 else packed
        )
    except zlib.error as error:
        raise PackageIndexError(f"{member.name}: it is damaged ({error})") from None
    if len(contents) != member.size:
        raise PackageIndexError(
            f"{member.name}: it does not unpack to the {member.size} bytes that it states"
        )
    if zlib.crc32(contents) != member.crc:
        raise PackageIndexError(f"{member.name}: CRC differs")
    return contents
