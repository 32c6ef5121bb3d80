"""The pins of related_commits: `os|project|component|branch|sha|url`, one a line.

Four projects are known here: `pytorch` (component `torch-2.13.0`, sha the `git_version` of its headers), `headers`
(component `torch-2.13.0-linux_x86_64`, sha one digest of all headers of its wheel), `toolchain` (component as in
matrix.toml, sha the compiler's full version, url the packages it comes from) and `package` (a package of a toolchain:
branch the toolchain, sha the version; url ends in the digest of its wheel, `#sha256=...`).
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields, replace
from functools import cache
from pathlib import Path

from build_matrix import REPOSITORY
from build_matrix.errors import BuildError
from build_matrix.store import files

FILE = REPOSITORY / "related_commits"
HEADERS = "headers"


@dataclass(frozen=True)
class Pin:
    """A line of related_commits."""

    os: str
    project: str
    component: str
    branch: str
    sha: str
    url: str


@cache
def load(path: Path = FILE) -> tuple[Pin, ...]:
    """Every pin; lines that begin with # are notes. Raises BuildError naming a line that has not six
    fields."""
    pins = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = [part.strip() for part in line.split("|")]
        if len(parts) != len(fields(Pin)):
            raise BuildError(f"{path.name}:{number}: {len(parts)} fields, want {len(fields(Pin))}")
        pins.append(Pin(*parts))
    return tuple(pins)


def find(project: str, component: str) -> Pin | None:
    """The pin of a component, or None."""
    return next((pin for pin in load() if (pin.project, pin.component) == (project, component)), None)


def torch(version: str) -> Pin | None:
    """The pin of torch `2.13.0` (without a local label), or None."""
    return find("pytorch", f"torch-{version.partition('+')[0]}")


def headers(version: str, platform: str) -> Pin | None:
    """The pin of all headers of torch `2.13.0` for a platform together, or None."""
    return find(HEADERS, f"torch-{version}-{platform}")


def torch_versions() -> list[str]:
    """The pinned releases of torch, in the order of the file."""
    return [p.component.removeprefix("torch-") for p in load() if p.project == "pytorch"]


def toolchain(name: str) -> Pin | None:
    """The pin of a toolchain of matrix.toml, or None."""
    return find("toolchain", name)


def packages(toolchain_name: str) -> list[str]:
    """The lines of a requirements file (`name==version --hash=sha256:...`) that make up a toolchain that comes from the
    package index."""
    found = [pin for pin in load() if (pin.project, pin.branch) == ("package", toolchain_name)]
    return [f"{p.component}=={p.sha} --hash=sha256:{p.url.partition('#sha256=')[2]}" for p in found]


def move(project: str, component: str, sha: str, path: Path = FILE) -> bool:
    """Writes a new sha into the pin's line. True when the file changed."""
    lines, changed = path.read_text(encoding="utf-8").splitlines(), False
    for index, line in enumerate(lines):
        parts = [part.strip() for part in line.split("|")]
        if len(parts) == len(fields(Pin)) and parts[1:3] == [project, component] and parts[4] != sha:
            lines[index], changed = "|".join(astuple(replace(Pin(*parts), sha=sha))), True
    if changed:
        files.write(path, "\n".join(lines) + "\n")
        load.cache_clear()
    return changed
