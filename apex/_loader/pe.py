"""Reads libraries for Windows (PE32+ files): what they export and which others they need.

Source of the layout: Microsoft's "PE Format".
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from apex._loader import system

MACHINES = {"x86_64": 0x8664, "aarch64": 0xAA64}
_PE32_PLUS = 0x20B
_EXPORTS, _IMPORTS, _DELAYED = 0, 1, 13  # places in the table of directories


class NotPe(ValueError):
    """The bytes are no whole 64-bit PE file; the message says what is wrong."""


class Pe:
    """A parsed file. Everything is read from `data`; a truncated file raises NotPe."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        if data[:2] != b"MZ":
            raise NotPe("the MZ magic is missing")
        (header,) = self._unpack("<I", 60)
        if data[header : header + 4] != b"PE\0\0":
            raise NotPe("the PE signature is missing")
        self.machine, count, _, _, _, optional, _ = self._unpack("<HHIIIHH", header + 4)
        optional_at = header + 24
        if self._unpack("<H", optional_at) != (_PE32_PLUS,):
            raise NotPe("not a 64-bit file")
        (directories,) = self._unpack("<I", optional_at + 108)
        self._directories = [
            self._unpack("<II", optional_at + 112 + 8 * k) for k in range(min(directories, 16))
        ]
        self._sections = []
        for k in range(count):
            size, address, in_file, offset = self._unpack("<8xIIII", optional_at + optional + 40 * k)
            if offset + in_file > len(data):
                raise NotPe("a section reaches past the end: the file is cut short")
            self._sections.append((address, min(size, in_file) or in_file, offset))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Pe:
        """The file at `path`. Raises OSError or NotPe."""
        return cls(Path(path).read_bytes())

    def exports(self) -> list[str]:
        """The names that it exports."""
        table = self._directory(_EXPORTS)
        if not table:
            return []
        count, names = self._unpack("<24xI4xI", self._offset(table))
        at = self._offset(names) if count else 0
        return [self._text(self._unpack("<I", at + 4 * k)[0]) for k in range(count)]

    def imports(self) -> list[str]:
        """The file names of the libraries that it needs."""
        return [
            self._text(name)
            for table, size, at in ((_IMPORTS, 20, 12), (_DELAYED, 32, 4))
            for name in self._names(table, size, at)
        ]

    def _names(self, table: int, size: int, at: int) -> list[int]:
        found: list[int] = []
        if row := self._directory(table):
            offset = self._offset(row)
            while name := self._unpack("<I", offset + len(found) * size + at)[0]:
                found.append(name)
        return found

    def _directory(self, place: int) -> int:
        return self._directories[place][0] if place < len(self._directories) else 0

    def _offset(self, address: int) -> int:
        """Where what lies at an address is in the file."""
        for start, size, offset in self._sections:
            if start <= address < start + size:
                return offset + address - start
        raise NotPe("an address is in no section: the file is damaged")

    def _text(self, address: int) -> str:
        start = self._offset(address)
        end = self.data.find(b"\0", start)
        if end < 0:
            raise NotPe("a string has no end")
        return self.data[start:end].decode("utf-8", "replace")

    def _unpack(self, form: str, offset: int) -> tuple[int, ...]:
        try:
            return struct.unpack_from(form, self.data, offset)
        except struct.error:
            raise NotPe("a table reaches past the end: the file is cut short") from None


def library_fault(path: str | os.PathLike[str], here: str = "") -> str | None:
    """Why a library must not be opened on a processor ("x86_64"; by default this one), or None."""
    path, here = Path(path), here or system.processor()
    if not os.path.isfile(path):
        return f"{path.name} is not installed"
    try:
        machine = Pe.read(path).machine
    except (OSError, ValueError) as error:
        return f"{path.name} is damaged: {error}"
    if machine != MACHINES.get(here, machine):
        return f"{path.name} was built for another processor (PE machine {machine:#x}, this one is {here})"
    return None
