"""Reads what the gate needs from ELF files: header, sections, symbols, notes, versions. Little-endian, 64
bit."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

EM_CUDA, EM_AMDGPU = 190, 224
SHT_SYMTAB, SHT_NOTE, SHT_DYNSYM = 2, 7, 11
STT_FUNC, STB_GLOBAL = 2, 1


@dataclass(frozen=True)
class Section:
    """A row of the section table."""

    name: str
    kind: int
    flags: int
    offset: int
    size: int
    link: int
    info: int


@dataclass(frozen=True)
class Symbol:
    """A row of a symbol table; `section` 0 is one that the file wants from others."""

    name: str
    bind: int
    kind: int
    other: int
    section: int
    value: int
    size: int


class Elf:
    """One ELF image. Raises ValueError when the bytes are not one."""

    def __init__(self, data: bytes):
        if data[:4] != b"\x7fELF" or len(data) < 64 or data[4] != 2 or data[5] != 1:
            raise ValueError("not a little-endian 64-bit ELF file")
        self.data = data
        self.abi_version = data[8]
        (_, self.machine, _, _, _, section_offset, self.flags, _, _, _, entry, count, names) = (
            struct.unpack_from("<HHIQQQIHHHHHH", data, 16)
        )
        raw = [struct.unpack_from("<IIQQQQIIQQ", data, section_offset + i * entry) for i in range(count)]
        strings = raw[names][4] if count else 0
        self.sections = [Section(self.text(strings + r[0]), r[1], r[2], r[4], r[5], r[6], r[7]) for r in raw]

    @classmethod
    def read(cls, path: Path) -> Elf:
        """The image in a file. Raises ValueError when it is none."""
        return cls(path.read_bytes())

    def text(self, offset: int) -> str:
        """The string that begins at an offset of the file."""
        return self.data[offset : self.data.index(b"\0", offset)].decode()

    def section(self, name: str) -> bytes:
        """The contents of the first section of that name; empty when there is none."""
        for section in self.sections:
            if section.name == name:
                return self.data[section.offset : section.offset + section.size]
        return b""

    def symbols(self, table: int = SHT_SYMTAB) -> list[Symbol]:
        """The symbols of the table of that kind (SHT_SYMTAB or SHT_DYNSYM)."""
        found = []
        for section in self.sections:
            if section.kind != table:
                continue
            strings = self.sections[section.link].offset
            for offset in range(section.offset, section.offset + section.size, 24):
                name, info, other, index, value, size = struct.unpack_from("<IBBHQQ", self.data, offset)
                found.append(
                    Symbol(self.text(strings + name), info >> 4, info & 15, other, index, value, size)
                )
        return found

    def notes(self) -> list[tuple[str, int, bytes]]:
        """(owner, type, contents) of every note."""
        found = []
        for section in self.sections:
            if section.kind != SHT_NOTE:
                continue
            at, end = section.offset, section.offset + section.size
            while at + 12 <= end:
                name_size, size, kind = struct.unpack_from("<III", self.data, at)
                start = at + 12 + (name_size + 3 & ~3)
                owner = self.data[at + 12 : at + 12 + max(name_size - 1, 0)].decode(errors="replace")
                found.append((owner, kind, self.data[start : start + size]))
                at = start + (size + 3 & ~3)
        return found
