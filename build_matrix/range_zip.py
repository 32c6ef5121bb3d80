"""Reads members of a zip archive on an HTTP server without fetching the archive.

One request for the end, one for the central directory, then one a run of neighbouring members: members are
sorted by offset and joined when the gap between them is small. A request a member would take minutes for a
torch wheel.
"""

from __future__ import annotations

import http.client
import re
import struct
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from build_matrix import package_index
from build_matrix.errors import PackageIndexError

GAP = 64 * 1024  # fetching a gap is cheaper than another request up to about this size
END, CENTRAL, LOCAL = b"PK\5\6", b"PK\1\2", b"PK\3\4"
TAIL = 65536 + 22


@dataclass(frozen=True)
class Member:
    """A row of the archive's central directory."""

    name: str
    method: int
    crc: int
    packed: int
    size: int
    offset: int


class RangeZip:
    """An archive at `url`. `downloaded` counts the bytes that came over the wire, `requests` the requests."""

    def __init__(self, url: str):
        self.url = url
        self.downloaded = 0
        self.requests = 0
        tail, total = self._fetch(-TAIL, None)
        at = tail.rfind(END)
        if at < 0:
            raise PackageIndexError(f"{url} is not a zip archive")
        _, _, _, count, size, offset, _ = struct.unpack_from("<HHHHIIH", tail, at + 4)
        start = total - len(tail)
        directory = tail[offset - start :] if offset >= start else self._fetch(offset, offset + size)[0]
        self.members = list(_members(directory, count))

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
                data = answer.read()
                first, last, total = map(int, re.findall(r"\d+", answer.headers["Content-Range"]))
        except (OSError, http.client.HTTPException, TypeError, ValueError) as error:
            raise PackageIndexError(f"{self.url}: {error}") from error
        if len(data) != last - first + 1:
            raise PackageIndexError(
                f"{self.url}: the download was cut, {len(data)} of {last - first + 1} bytes came"
            )
        self.downloaded += len(data)
        self.requests += 1
        return data, total

    def read(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
        """(name, contents) of every member whose name is wanted. Raises PackageIndexError when a CRC
        differs."""
        chosen = sorted((m for m in self.members if wanted(m.name)), key=lambda member: member.offset)
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
            raise PackageIndexError("the central directory of the archive is damaged")
        method, _, _, crc, packed, size, name, extra, comment = struct.unpack_from(
            "<HHHIIIHHH", directory, at + 10
        )
        (offset,) = struct.unpack_from("<I", directory, at + 42)
        text = directory[at + 46 : at + 46 + name].decode()
        if 0xFFFFFFFF in (packed, size, offset):
            raise PackageIndexError(f"{text} lies beyond 4 GiB of the archive")
        yield Member(text, method, crc, packed, size, offset)
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
    start = at + 30 + name + extra
    packed = data[start : start + member.packed]
    try:
        contents = zlib.decompress(packed, -15) if member.method == 8 else packed
    except zlib.error as error:
        raise PackageIndexError(f"{member.name}: it is damaged ({error})") from None
    if zlib.crc32(contents) != member.crc:
        raise PackageIndexError(f"{member.name}: CRC differs")
    return contents
