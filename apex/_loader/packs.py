"""Kernel packs: the code objects of one arch and their manifest.

What a pack covers is read from the objects. A manifest's word, or a file being there, is not believed: each
file is opened, its digest, arch and kernel names are compared with the manifest, and a unit that fails is not
covered, for a reason that names the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from apex._loader import elf, tree
from apex._loader.errors import InstallationError

FORMAT = 1
COMPRESSED = ".xz"  # of code objects in wheels; those of a checkout are plain


@dataclass(frozen=True)
class Code:
    """A unit's code object as described: `contents` says what it holds, or `fault` why it cannot be used."""

    path: Path | None
    contents: elf.CodeObject | None = None
    fault: str | None = None


@dataclass(frozen=True)
class Pack:
    """Code objects of one arch.

    arch:     "sm_90", "compute_80" (PTX), "gfx942", "gfx9-4-generic"
    vendor:   "cuda" or "rocm"
    kind:     "cubin", "ptx" or "hsaco"
    compiler: (name, version), such as ("nvcc", "13.0.88")
    units:    unit name -> Code; a unit that is absent was not built for this arch
    fault:    why the whole pack cannot be used, or None
    """

    arch: str
    vendor: str
    kind: str
    compiler: tuple[str, str] = ("", "")
    units: Mapping[str, Code] = field(default_factory=dict)
    fault: str | None = None

    def __hash__(self):
        return hash((self.arch, self.vendor, self.kind))


class _Units(Mapping):
    """Describes a unit when it is asked for: a process opens the objects it uses, not the whole wheel."""

    def __init__(self, folder, arch, rows):
        self._folder, self._arch, self._rows, self._known = folder, arch, rows, {}

    def __getitem__(self, unit):
        row = self._rows[unit]
        if unit not in self._known:
            self._known[unit] = _describe(self._folder, self._arch, row)
        return self._known[unit]

    def __iter__(self):
        return iter(self._rows)

    def __len__(self):
        return len(self._rows)


class _Damaged(Exception):
    """A file whose bytes are not what was written; says why."""


def _read(path):
    """Bytes of a code object. Raises OSError, or _Damaged where they cannot be decompressed."""
    data = path.read_bytes()
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


def _describe(folder, arch, row):
    path = folder / row.get("file", "")
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
    manifest = tree.read_json(folder / "manifest.json")
    if manifest is None:
        return Pack(
            folder.name, _vendor(folder.name), "", fault="its manifest.json is missing or cannot be read"
        )
    if manifest.get("format") != FORMAT:
        fault = f"its manifest has format {manifest.get('format')}, this apex reads {FORMAT}"
        return Pack(folder.name, _vendor(folder.name), "", fault=fault)
    compiler = manifest.get("compiler") or {}
    return Pack(
        arch=manifest["arch"],
        vendor=manifest["vendor"],
        kind=manifest["kind"],
        compiler=(compiler.get("name", ""), compiler.get("version", "")),
        units=_Units(folder, manifest["arch"], manifest.get("units", {})),
    )


def _vendor(arch):
    return "rocm" if arch.startswith("gfx") else "cuda"


def installed() -> tuple[Pack, ...]:
    """All packs of this installation, sorted by arch; empty if it holds none."""
    folder = tree.packs()
    if not folder.is_dir():
        return ()
    return tuple(read(entry) for entry in sorted(folder.iterdir()) if entry.is_dir())


def image(code: Code) -> bytes:
    """Bytes of a described code object that has no fault. Raises InstallationError if it is gone since."""
    try:
        return _read(code.path)
    except (OSError, _Damaged) as error:
        found = getattr(error, "strerror", None) or str(error)
        raise InstallationError(
            "a code object vanished after it was chosen", wanted=str(code.path), found=found
        ) from error
