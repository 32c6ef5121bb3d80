"""What a release of apex holds: its wheels, the torch, Python and platforms they are for, their packs, its index.

Every wheel carries the table of its whole release (release.json), so that the answer to "which apex?" is the same
from any of them, and from the checkout that builds them. Imports neither torch nor anything outside Python.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from apex._loader import compatibility, layout
from apex._loader.elf import CodeObject
from apex._loader.machine import Binding, Code, Pack

FORMAT = 1
FILE = "release.json"
SOMEWHERE = "<index>"  # stands for an address that nobody has named
EVERY = "every op"  # the unit of a release's packs: its gate lets no pack out that lacks one


@dataclass(frozen=True)
class Accelerator:
    """A distribution: `name` cpu, cuda, rocm or npu; `label` of its version; `roots` of the index that list it; `pure`:
    Python alone, one wheel for every Python and platform."""

    name: str
    label: str
    roots: tuple[str, ...]
    pure: bool = False

    @property
    def distribution(self) -> str:
        """ "apex-cuda": the name that pip knows."""
        return f"apex-{self.name}"


@dataclass(frozen=True)
class NpuRow:
    """A torch_npu, the CANN and torch that it is for ("8.5.0", "9.1.X"; "2.9.0"), and the Pythons it has wheels for."""

    cann: str
    torch: str
    torch_npu: str
    python: tuple[str, ...]


@dataclass(frozen=True)
class Release:
    """The table.

    torch:      minor -> release, {"2.13": "2.13.0"}, oldest first
    pythons:    tags that every platform has wheels for; `optional`: built where such an interpreter is found
    ruled_out:  (torch minor, Python tag) -> why there is no binding
    platforms:  name -> (names of its accelerators, why not all)
    portable:   those of them whose one wheel is for every Python and holds no compiled binding
    bindings:   what the wheels hold, of every Python
    packs:      of all accelerators, each with the one unit EVERY
    pins:       torch release or toolchain -> commit or version that it was built with
    toolchains: arch -> the toolchain of its pack
    grades:     what was known when the table was written: "torch minor, tag" -> grade of the binding
    npu:        which torch_npu goes with which CANN and torch, oldest CANN first
    index:      where the release is served, or "" where nobody said
    """

    version: str
    accelerators: tuple[Accelerator, ...]
    torch: Mapping[str, str]
    pythons: tuple[str, ...]
    optional: tuple[str, ...] = ()
    ruled_out: Mapping[tuple[str, str], str] = field(default_factory=dict)
    platforms: Mapping[str, tuple[tuple[str, ...], str]] = field(default_factory=dict)
    portable: tuple[str, ...] = ()
    bindings: tuple[Binding, ...] = ()
    packs: tuple[Pack, ...] = ()
    pins: Mapping[str, str] = field(default_factory=dict)
    toolchains: Mapping[str, str] = field(default_factory=dict)
    grades: Mapping[tuple[str, str], str] = field(default_factory=dict)
    npu: tuple[NpuRow, ...] = ()
    index: str = ""

    def accelerator(self, name: str) -> Accelerator:
        """The Accelerator of that name."""
        return next(found for found in self.accelerators if found.name == name)

    def pythons_for(self, minor: str) -> tuple[str, ...]:
        """Tags whose wheels hold a binding for a torch minor."""
        return tuple(
            tag for tag in self.pythons if minor in self.torch and not self.ruled_out.get((minor, tag))
        )

    def why_no_wheel(self, name: str, platform: str) -> str | None:
        """Why a platform has no wheel of an accelerator, or None."""
        if platform not in self.platforms:
            return f"no wheel is built for {platform}; there are {', '.join(self.platforms)}"
        accelerators, reason = self.platforms[platform]
        return None if name in accelerators else f"no wheel apex-{name} is built for {platform}: {reason}"

    def why_no_python(self, tag: str) -> str | None:
        """Why no wheel for a Python can be counted on, or None."""
        if tag in self.pythons:
            return None
        if tag in self.optional:
            return f"no wheel is built for {tag}, but where such an interpreter is found"
        return f"no wheel is built for {tag}; there are {', '.join(self.pythons)}"

    def root(self, accelerator: Accelerator, named: str | None = None) -> str:
        """The address of the index root of an accelerator. `named`, else APEX_INDEX, else the release's own; a trailing
        /whl is the same address."""
        base = named or os.environ.get("APEX_INDEX") or self.index or SOMEWHERE
        return f"{re.sub(r'(/whl)?/*$', '', base)}/whl/{accelerator.roots[0]}/"


def parse(value: Any) -> Release:
    """The Release that release.json says. Raises ValueError for another format, and for what is damaged."""
    if value.get("format") != FORMAT:
        raise ValueError(f"{FILE} has format {value.get('format')}, this apex reads {FORMAT}")
    try:
        return _parse(value)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{FILE} is damaged: {type(error).__name__} {error}") from error


def _parse(value: Any) -> Release:
    torch = {_minor(row["release"]): row for row in value["torch"]}
    return Release(
        version=value["version"],
        accelerators=tuple(
            Accelerator(a["name"], a["label"], tuple(a["roots"]), a.get("pure", False))
            for a in value["accelerators"]
        ),
        torch={minor: row["release"] for minor, row in torch.items()},
        pythons=tuple(value["python"]),
        optional=tuple(value["optional_python"]),
        ruled_out={(_minor(row["torch"]), row["python"]): row["reason"] for row in value["ruled_out"]},
        platforms={p["name"]: (tuple(p["accelerators"]), p["reason"]) for p in value["platforms"]},
        portable=tuple(p["name"] for p in value["platforms"] if p.get("portable")),
        bindings=tuple(
            Binding(minor, f"torch{minor}", row["release"], row["git_version"], tag)
            for minor, row in torch.items()
            for tag in row["python"]
        ),
        packs=tuple(_pack(row) for row in value["packs"]),
        pins=value["pins"],
        toolchains={row["arch"]: row["toolchain"] for row in value["packs"]},
        grades={(row["torch"], row["python"]): row["grade"] for row in value.get("grades", ())},
        npu=tuple(NpuRow(**row | {"python": tuple(row["python"])}) for row in value.get("npu", ())),
        index=value["index"],
    )


def _pack(row: Mapping[str, Any]) -> Pack:
    arch, compiler = row["arch"], tuple(row["compiler"])
    numbers = [int(number) for number in re.findall(r"\d+", compiler[1])]
    toolkit = (numbers[0], (*numbers, 0)[1])
    kind, vendor = row["kind"], "rocm" if arch.startswith("gfx") else "cuda"
    version = {"cubin": None, "ptx": compatibility.ptx_of(toolkit), "hsaco": row.get("code_object")}[kind]
    made_by = toolkit if vendor == "cuda" else None
    contents = CodeObject(kind, arch, (EVERY,), toolkit=made_by, version=version)
    return Pack(arch, vendor, kind, compiler, {EVERY: Code(None, contents)})


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def known() -> Release | None:
    """`load()`, and None where it cannot be read: what is damaged keeps nobody from hearing what mends it."""
    try:
        return load()
    except ValueError:
        return None


def load() -> Release | None:
    """The Release of this checkout or wheel; None where neither says (a source install). Raises ValueError where what
    says it is damaged."""
    if layout.checkout():
        try:
            from build_matrix import errors
            from build_matrix.parts import releases  # a checkout's own matrix goes with its Python code
        except ImportError:
            pass
        else:
            try:
                return parse(releases.table())
            except errors.NoToml:
                pass  # what was built last says it
            except errors.BuildError as error:
                raise ValueError(str(error)) from error
    path = layout.built() / FILE
    value = layout.read_json(path, dict)
    if value is None and os.path.lexists(path):
        raise ValueError(f"{FILE} is damaged: it is no whole JSON")
    return None if value is None else parse(value)
