"""Kernel packs: the code objects of one arch and their manifest.

What a pack covers is read from the objects. A manifest's word, or a file being there, is not believed: each
file is opened, its digest, arch and kernel names are compared with the manifest, and a unit that fails is not
covered, for a reason that names the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from apex._loader import elf, layout
from apex._loader.errors import InstallationError
from apex._loader.machine import Code, Pack

FORMAT = 1
COMPRESSED = ".xz"  # of code objects in wheels; those of a checkout are plain
Row = Mapping[str, Any]  # of a manifest


class _Units(Mapping[str, Code]):
    """Describes a unit when it is asked for: a process opens the objects it uses, not the whole wheel."""

    def __init__(self, folder: Path, arch: str, rows: Mapping[str, Row]) -> None:
        self._folder, self._arch, self._rows = folder, arch, rows
        self._known: dict[str, Code] = {}

    def __getitem__(self, unit: str) -> Code:
        row = self._rows[unit]
        if unit not in self._known:
            self._known[unit] = _describe(self._folder, self._arch, row)
        return self._known[unit]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class _Damaged(Exception):
    """A file whose bytes are not what was written; says why."""


def _read(path: Path) -> bytes:
    """Bytes of a code object. Raises OSError, or _Damaged where they cannot be decompressed."""
    data = layout.read_bytes(path)
    if path.suffix != COMPRESSED:
        return data
    try:
        import lzma  # Python can be built without it
    except ImportError as error:
        raise _Damaged(f"{path.name} is compressed, and this Python has no module lzma") from error
    try:
        return lzma.decompress(data)
    except lzma.LZMAError as error:
        raise _Damaged(f"{path.name} is damaged: it cannot be decompressed ({error})") from error


def _describe(folder: Path, arch: str, row: Row) -> Code:
    path = folder / row["file"]
    try:
        data = _read(path)
    except OSError as error:
        return Code(path, fault=f"{path.name} is in the manifest but cannot be read ({error.strerror})")
    except _Damaged as error:
        return Code(path, fault=str(error))
    if row.get("sha256") and hashlib.sha256(data).hexdigest() != row["sha256"]:
        return Code(path, fault=f"{path.name} is damaged: its digest is not the manifest's")
    try:
        contents = elf.read_code_object(data)
    except elf.NotElf as error:
        return Code(path, fault=f"{path.name} is no code object: {error}")
    if contents.arch != arch:
        return Code(path, contents, f"{path.name} holds code for {contents.arch}, its manifest says {arch}")
    missing = sorted(set(row.get("kernels", ())) - set(contents.kernels))
    if missing:
        return Code(path, contents, f"{path.name} lacks the kernel {missing[0]} ({len(missing)} missing)")
    if not contents.kernels:
        return Code(path, contents, f"{path.name} holds no kernel")
    return Code(path, contents)


def read(folder: Path) -> Pack:
    """The Pack in `folder`. Damage never raises: it becomes the pack's or a unit's `fault`."""
    folder = Path(folder)
    manifest = layout.read_json(folder / "manifest.json", dict)
    if manifest is None:
        return _unusable(folder, "its manifest.json is missing or cannot be read")
    if manifest.get("format") != FORMAT:
        return _unusable(
            folder, f"its manifest has format {manifest.get('format')}, this apex reads {FORMAT}"
        )
    try:
        return _parse(folder, manifest)
    except (KeyError, TypeError, AttributeError) as error:
        return _unusable(folder, f"its manifest.json is damaged: {type(error).__name__} {error}")


def _unusable(folder: Path, fault: str) -> Pack:
    return Pack(folder.name, _vendor(folder.name), "", fault=fault)


def _parse(folder: Path, manifest: Row) -> Pack:
    """The Pack that a manifest tells of. Raises KeyError, TypeError or AttributeError for one of another shape."""
    compiler = manifest.get("compiler") or {}
    arch, vendor, kind = (_text(manifest[key]) for key in ("arch", "vendor", "kind"))
    rows = manifest.get("units", {})
    for row in rows.values():
        name = _text(row["file"])
        if name in ("", "..") or name != Path(name).name:
            return _unusable(folder, f"its manifest names {name!r}, which is no file of its folder")
    made_by = (_text(compiler.get("name", "")), _text(compiler.get("version", "")))
    return Pack(arch, vendor, kind, made_by, _Units(folder, arch, rows))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _vendor(arch: str) -> str:
    return "rocm" if arch.startswith("gfx") else "cuda"


def image(code: Code) -> bytes:
    """Bytes of a described code object that has no fault. Raises InstallationError if it is gone since."""
    try:
        if code.path is None:
            raise _Damaged("it is known from a table alone")
        return _read(code.path)
    except (OSError, _Damaged) as error:
        found = getattr(error, "strerror", None) or str(error)
        raise InstallationError(
            "a code object vanished after it was chosen", wanted=str(code.path), found=found
        ) from error
