"""What compilers and linkers really read beside the sources: torch's, CPython's, a device compiler's and the system's
headers, and the objects that every library is linked with, by content.

A unit that compiles keeps, beside its output, the SHA-256 of every such file under the part it belongs to. Neither
paths nor times are in it, so that the same headers give the same digests wherever they lie.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from build_matrix.errors import BuildError
from build_matrix.store import digest

FILE = "inputs.json"
TOOLKIT = "toolkit"  # a device compiler's own headers
SYSTEM = "system"  # the C and C++ libraries', the kernel's and the compiler's own headers, crti.o, libgcc.a
SYSTEM_NAME = "C and C++ library headers and objects"  # as the bill of materials and the statement call them
DEPENDENCY = re.compile(r"(?:\\\s|[^\s\\]|\\(?!\n))+")


def of_rule(text: str) -> list[str]:
    """The files that a rule for make (`-MD`) names after its target."""
    names = DEPENDENCY.findall(text.partition(":")[2].replace("\\\n", " "))
    return [re.sub(r"\\([\s#])", r"\1", name).replace("$$", "$") for name in names]


def of_trace(text: str) -> list[str]:
    """The objects and archives that a linker names by --trace, one a line, with or without a member. Shared libraries
    are needed and not linked in: they are left out."""
    names = [re.sub(r"^\((.+\.a)\)\S+$|\(\S+\)$", r"\1", line.strip()) for line in text.splitlines()]
    return sorted({name for name in names if name.endswith((".o", ".a"))})


def sort(
    read: Iterable[str], parts: Mapping[str, Iterable[Path]], own: Iterable[Path]
) -> dict[str, list[str]]:
    """The digests of the files `read`, by part: that whose folders hold a file, else SYSTEM. Files in the folders `own`
    (the sources, which are inputs by name, and what is generated) are left out; a part goes before them."""
    folders = [(name, os.path.realpath(folder)) for name, given in parts.items() for folder in given]
    folders += [("", os.path.realpath(folder)) for folder in own]
    found: dict[str, set[str]] = {}
    for path in sorted({os.path.realpath(name) for name in read}):
        part = next((name for name, folder in folders if path.startswith(folder + os.sep)), SYSTEM)
        if part:
            found.setdefault(part, set()).add(digest.of_file(path))
    return {name: sorted(digests) for name, digests in sorted(found.items())}


def write(folder: Path, found: Mapping[str, list[str]]) -> None:
    """Keeps digests by part beside a unit's output, for `read`."""
    (folder / FILE).write_text(json.dumps(found, indent=1) + "\n")


def read(folder: Path) -> dict[str, list[str]]:
    """What the unit whose output lies in `folder` kept. Raises BuildError where it kept nothing."""
    try:
        return json.loads((folder / FILE).read_text())
    except (OSError, ValueError) as error:
        raise BuildError(f"{folder} does not say which headers it was compiled with: {error}") from error


def union(several: Iterable[Mapping[str, list[str]]]) -> dict[str, list[str]]:
    """Of several units together."""
    found: dict[str, set[str]] = {}
    for each in several:
        for part, digests in each.items():
            found.setdefault(part, set()).update(digests)
    return {name: sorted(digests) for name, digests in sorted(found.items())}


def of_part(several: Iterable[Mapping[str, list[str]]], part: str) -> str:
    """One digest of all files of a part that units read: the SHA-256 of the sorted SHA-256 of each. Raises BuildError
    where none was read: then nobody knows what went in."""
    found = union(several).get(part)
    if not found:
        raise BuildError(f"no header of {part} is known to have been read: its digest would be of nothing")
    return digest.of_values(found)
