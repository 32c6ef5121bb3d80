"""What a checkout and a wheel are made of, as two digests that receipts are bound by: of all that is compiled, and
of the Python beside it. Standard library alone: GPU machines run it too."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from build_matrix import REPOSITORY
from build_matrix.errors import BuildError
from build_matrix.store import archive, digest

CSRC = REPOSITORY / "csrc"
VERSION = REPOSITORY / "version.txt"


@dataclass(frozen=True)
class Source:
    """`compiled`: as `source_sha256` of a wheel's build.json; `python`: every module of apex/."""

    compiled: str
    python: str

    def as_json(self) -> dict[str, str]:
        """As receipts hold it."""
        return asdict(self)


def version() -> str:
    """1.10.0: the version of this checkout. Raises BuildError where version.txt holds none."""
    found = VERSION.read_bytes().decode("utf-8", "replace").strip()
    if not re.fullmatch(r"\d+(\.\d+)*[.\w]*", found, re.ASCII):
        raise BuildError(
            f"{VERSION.name} holds {found[:40]!r}, which is no version such as 1.10.0. Run: git checkout {VERSION.name}"
        )
    return found


def compiled() -> str:
    """One digest of everything of this checkout that is compiled."""
    files = sorted(path for path in CSRC.rglob("*") if path.is_file() and "testing" not in path.parts)
    return digest.of_values({str(path.relative_to(CSRC)): digest.of_file(path) for path in files})


@cache
def checkout() -> Source:
    """Of this checkout as it was when it was first asked for."""
    modules = sorted((REPOSITORY / "apex").rglob("*.py"))
    python = {str(path.relative_to(REPOSITORY)): digest.of_file(path) for path in modules}
    return Source(compiled(), digest.of_values(python))


def wheel(path: Path) -> Source:
    """Of a wheel, from its own contents. Raises KeyError, ValueError or zipfile.BadZipFile for a file that is no wheel
    of apex."""
    with archive.wheel(path) as opened:
        names = [n for n in opened.namelist() if n.startswith("apex/") and n.endswith(".py")]
        python = {name: digest.of_bytes(opened.read(name)) for name in sorted(names)}
        facts = json.loads(opened.read("apex/build.json"))
    return Source(facts["source_sha256"], digest.of_values(python))


def pack(manifest: dict) -> str:
    """One digest of the code objects of a pack, from its manifest."""
    return digest.of_values({name: unit["sha256"] for name, unit in manifest["units"].items()})
