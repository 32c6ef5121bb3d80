"""Reads ELF files: code objects (cubin, hsaco) and shared libraries. Only what the loader and the farm ask of them.

Sources of the layouts: the ELF64 specification; LLVM's AMDGPU and NVPTX back-end documents; cubins of CUDA
                        12.8 and 13.0, whose headers differ (`_nvidia`).
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apex._loader import system

EM_X86_64, EM_AARCH64, EM_CUDA, EM_AMDGPU = 62, 183, 190, 224
_SHT_SYMTAB, _SHT_NOTE, _SHT_DYNAMIC, _SHT_DYNSYM = 2, 7, 6, 11
STT_FUNC, STB_GLOBAL, STB_WEAK = 2, 1, 2
_DT_NEEDED, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 1, 14, 15, 29
_TARGET = re.compile(rb"amdgcn-amd-amdhsa-[a-z]*-(gfx[0-9a-z-]+)((?::\w+[+-])*)")
_TOOLKIT = re.compile(rb"release (\d+)\.(\d+)")


class NotElf(ValueError):
    """The bytes are no whole little-endian 64-bit ELF file; the message says what is wrong."""


@dataclass(frozen=True)
class Section:
    """A row of the section table."""

    name: str
    kind: int
    offset: int
    size: int
    link: int
    info: int


@dataclass(frozen=True)
class Symbol:
    """A row of a symbol table; `section` 0 is one that the file wants from others."""

    name: str
    kind: int
    bind: int
    other: int
    section: int

    @property
    def is_global(self) -> bool:
        """Whether others see it, weak ones included."""
        return self.bind != 0

    @property
    def defined(self) -> bool:
        """Whether this file has it."""
        return self.section != 0


class Elf:
    """A parsed file. Everything is read from `data`; a truncated file raises NotElf."""

    def __init__(self, data: bytes | mmap.mmap) -> None:
        self.data = data
        if len(data) < 64:
            raise NotElf(f"{len(data)} bytes are too few for an ELF header")
        if data[:4] != b"\x7fELF":
            raise NotElf("the ELF magic is missing")
        if data[4] != 2 or data[5] != 1:
            raise NotElf("not a little-endian 64-bit file")
        self.abi, self.abi_version = data[7], data[8]
        header = struct.unpack_from("<HHIQQQIHHHHHH", data, 16)
        self.machine, self.flags = header[1], header[6]
        offset, size, count, names = header[5], header[10], header[11], header[12]
        segments_end = header[4] + header[8] * header[9] if header[9] else 0  # cubins end with this table
        if count and size != 64:
            raise NotElf(f"a row of the section table has {size} bytes, not 64")
        if max(offset + size * count, segments_end) > len(data):
            raise NotElf("a table of the header reaches past the end: the file is cut short")
        rows = [struct.unpack_from("<IIQQQQIIQQ", data, offset + size * k) for k in range(count)]
        strings = rows[names] if names < count else None
        self.sections = []
        for name, kind, _flags, _address, start, length, link, info, _align, _entry in rows:
            if kind != 8 and start + length > len(data):  # 8: SHT_NOBITS takes no room in the file
                raise NotElf("a section reaches past the end: the file is cut short")
            text = self.text(strings[4] + name) if strings else ""
            self.sections.append(Section(text, kind, start, length, link, info))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Elf:
        """The file at `path`. Raises OSError or NotElf."""
        return cls(Path(path).read_bytes())

    def text(self, offset: int) -> str:
        """The string that begins at an offset of the file."""
        end = self.data.find(b"\0", offset)
        if end < 0:
            raise NotElf("a string has no end")
        return self.data[offset:end].decode("utf-8", "replace")

    def section(self, name: str) -> bytes:
        """The contents of the first section of that name; empty where there is none."""
        return next((self._bytes(section) for section in self.sections if section.name == name), b"")

    def _bytes(self, section: Section) -> bytes:
        return self.data[section.offset : section.offset + section.size]

    def _of_kind(self, kind: int) -> list[Section]:
        return [section for section in self.sections if section.kind == kind]

    def _rows(self, table: Section, form: str) -> Iterator[tuple[Any, ...]]:
        if table.size % struct.calcsize(form):
            raise NotElf("a table ends within a row: the file is damaged")
        return struct.iter_unpack(form, self._bytes(table))

    def _strings_of(self, table: Section) -> int:
        """Where the strings of a table begin."""
        if table.link >= len(self.sections):
            raise NotElf("a table names strings that are not there: the file is damaged")
        return self.sections[table.link].offset

    def symbols(self, dynamic: bool = False) -> list[Symbol]:
        """The symbols of .symtab, or of .dynsym."""
        found = []
        for table in self._of_kind(_SHT_DYNSYM if dynamic else _SHT_SYMTAB):
            strings = self._strings_of(table)
            for name, info, other, section, _value, _size in self._rows(table, "<IBBHQQ"):
                found.append(Symbol(self.text(strings + name), info & 15, info >> 4, other, section))
        return found

    def notes(self) -> bytes:
        """The bytes of all note sections, joined."""
        return b"".join(self._bytes(section) for section in self._of_kind(_SHT_NOTE))

    def note(self, owner: str, kind: int) -> bytes | None:
        """The contents of the first note of an owner and a type; None where there is none."""
        for data in map(self._bytes, self._of_kind(_SHT_NOTE)):
            at = 0
            while at + 12 <= len(data):
                name_size, size, its_kind = struct.unpack_from("<III", data, at)
                start = at + 12 + (name_size + 3 & ~3)
                if its_kind == kind and data[at + 12 : at + 12 + name_size].rstrip(b"\0") == owner.encode():
                    return data[start : start + size]
                at = start + (size + 3 & ~3)
        return None

    def dynamic(self) -> tuple[str | None, list[str], list[str]]:
        """(soname or None, needed names, run-path entries) of a shared library."""
        soname, needed, runpath = None, [], []
        for table in self._of_kind(_SHT_DYNAMIC):
            strings = self._strings_of(table)
            for tag, value in self._rows(table, "<QQ"):
                if tag == _DT_NEEDED:
                    needed.append(self.text(strings + value))
                elif tag == _DT_SONAME:
                    soname = self.text(strings + value)
                elif tag in (_DT_RPATH, _DT_RUNPATH):
                    runpath += self.text(strings + value).split(":")
        return soname, needed, runpath


@dataclass(frozen=True)
class CodeObject:
    """What a code object says about itself.

    kind:    "cubin", "hsaco" or "ptx"
    arch:    "sm_90", "gfx942", "gfx9-4-generic", "compute_80"
    kernels: names that can be launched, sorted
    features: settings it insists on, such as ("xnack-",)
    toolkit: (major, minor) of the CUDA toolkit that wrote it, or None where it does not say
    version: code object version on AMD (5, 6), PTX ISA as (8, 7), None for a cubin
    """

    kind: str
    arch: str
    kernels: tuple[str, ...]
    features: tuple[str, ...] = ()
    toolkit: tuple[int, int] | None = None
    version: int | tuple[int, int] | None = None


def read_code_object(data: bytes) -> CodeObject:
    """The CodeObject in `data` (bytes of a cubin, hsaco or PTX file). Raises NotElf on anything else."""
    if data[:4] != b"\x7fELF":
        if data[:24] == b"__CLANG_OFFLOAD_BUNDLE__":
            raise NotElf("an offload bundle, not a bare code object")
        return _ptx(data)
    elf = Elf(data)
    if elf.machine == EM_CUDA:
        return _nvidia(elf)
    if elf.machine == EM_AMDGPU:
        return _amd(elf)
    raise NotElf(f"an ELF file for machine {elf.machine}, not a GPU code object")


def _nvidia(elf: Elf) -> CodeObject:
    # ABI version 7 (CUDA 12) keeps the arch in the lowest byte of the flags, 8 (CUDA 13) in the next.
    newer = elf.abi_version >= 8
    number = (elf.flags >> 8 if newer else elf.flags) & 0xFF
    entries = {section.name[len(".text.") :] for section in elf.sections if section.name.startswith(".text.")}
    kernels = {
        symbol.name
        for symbol in elf.symbols()
        if symbol.kind == STT_FUNC and symbol.is_global and symbol.defined and symbol.name in entries
    }
    note = _TOOLKIT.search(elf.notes())
    toolkit = (int(note[1]), int(note[2])) if note else ((13, 0) if newer else None)
    return CodeObject("cubin", f"sm_{number}", tuple(sorted(kernels)), toolkit=toolkit)


def _amd(elf: Elf) -> CodeObject:
    target = _TARGET.search(elf.notes())
    if target is None:
        raise NotElf("an AMD code object without its target note")
    # A kernel is a function with a descriptor beside it; a device function has none.
    kernels = {symbol.name[:-3] for symbol in elf.symbols(dynamic=True) if symbol.name.endswith(".kd")}
    features = tuple(part.decode() for part in target[2].split(b":") if part)
    return CodeObject(
        "hsaco", target[1].decode(), tuple(sorted(kernels)), features, version=elf.abi_version + 2
    )


def _ptx(data: bytes) -> CodeObject:
    text = data.rstrip(b"\0").decode("utf-8", "replace")
    isa = re.search(r"^\s*\.version\s+(\d+)\.(\d+)", text, re.M)
    target = re.search(r"^\s*\.target\s+sm_(\w+)", text, re.M)
    if not isa or not target:
        raise NotElf("neither ELF nor PTX")
    if not text.rstrip().endswith("}"):
        raise NotElf("PTX that is cut short")
    kernels = tuple(sorted(re.findall(r"\.entry\s+([\w$]+)", text)))
    release = re.search(r"compilation tools, release (\d+)\.(\d+)", text)
    toolkit = (int(release[1]), int(release[2])) if release else None
    return CodeObject(
        "ptx", f"compute_{target[1]}", kernels, toolkit=toolkit, version=(int(isa[1]), int(isa[2]))
    )


@dataclass(frozen=True)
class SharedLibrary:
    """Dynamic section of a shared library: soname or None, needed sonames, run-path folders."""

    path: Path
    machine: int
    soname: str | None
    needed: tuple[str, ...]
    runpath: tuple[str, ...]


def read_shared_library(path: str | os.PathLike[str]) -> SharedLibrary:
    """The SharedLibrary at `path`. Raises OSError or NotElf."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        elf = Elf(data)  # mapped, because torch's own libraries have hundreds of megabytes
        soname, needed, runpath = elf.dynamic()
    origin = str(Path(path).resolve().parent)
    folders = tuple(
        entry.replace("${ORIGIN}", "$ORIGIN").replace("$ORIGIN", origin) for entry in runpath if entry
    )
    return SharedLibrary(Path(path), elf.machine, soname, tuple(needed), folders)


def library_fault(path: str | os.PathLike[str]) -> str | None:
    """Why the shared library at `path` must not be opened, or None.

    Asked before dlopen, because the loader of the C library takes the process down (SIGBUS) on a file that is
    cut short, and says "cannot open" of one for another processor.
    """
    path = Path(path)
    if not os.path.isfile(path):
        return f"{path.name} is not installed"
    try:
        machine = read_shared_library(path).machine
    except (OSError, ValueError) as error:
        return f"{path.name} is damaged: {error}"
    here = system.processor()
    if machine != {"x86_64": EM_X86_64, "aarch64": EM_AARCH64}.get(here, machine):
        return f"{path.name} was built for another processor (ELF machine {machine}, this one is {here})"
    return None
