"""A static package index: one root an accelerator build of torch (whl/cpu/, whl/cu130/, whl/rocm7.2/), pages
of PEP 503 and PEP 691, yanked wheels (PEP 592), and the metadata of each wheel beside it (PEP 658, 714). Any web server
can serve the folder."""

from __future__ import annotations

import fnmatch
import glob
import json
import os
import re
import shutil
import tempfile
import urllib.parse
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock
from jinja2 import Environment

from build_matrix import REPOSITORY
from build_matrix.errors import BuildError
from build_matrix.spec import matrix, toml
from build_matrix.store import archive, digest
from build_matrix.wheels import alias
from build_matrix.wheels.wheel_file import DAMAGED

YANKED = REPOSITORY / "release_notes/yanked.toml"
PAGES = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
ROOT_PAGE = PAGES.from_string("""<!DOCTYPE html>
<html>
  <head><meta name="pypi:repository-version" content="1.1"><title>apex: {{ root }}</title></head>
  <body>
  {% for project in projects %}
    <a href="{{ project }}/">{{ project }}</a><br>
  {% endfor %}
  </body>
</html>
""")
PROJECT_PAGE = PAGES.from_string("""<!DOCTYPE html>
<html>
  <head><meta name="pypi:repository-version" content="1.1"><title>Links for {{ project }}</title></head>
  <body>
    <h1>Links for {{ project }}</h1>
  {% for f in files %}
    <a href="{{ f.url }}#sha256={{ f.sha256 }}" data-requires-python="{{ f.requires_python }}"\
 data-core-metadata="sha256={{ f.metadata_sha256 }}" data-dist-info-metadata="sha256={{ f.metadata_sha256
 }}"\
{% if f.yanked %} data-yanked="{{ f.yanked }}"{% endif %}>\
{{ f.name }}</a><br>
  {% endfor %}
  </body>
</html>
""")
FILES = "files"
JSON_PAGE = "index.json"
# Everything that an index consists of, by its path in it; a name with a slash at its end is a folder's.
OWN = re.compile(
    r"index\.html|files/([^/]+\.whl(\.metadata)?)?|whl/(index\.html|[^/]+/([^/]+/)?(index\.(html|json))?)?"
)


@dataclass(frozen=True)
class IndexedWheel:
    """A wheel as the pages list it. `url` is relative to a project's page; `yanked` says why resolvers pass over it."""

    name: str
    project: str
    version: str
    sha256: str
    size: int
    metadata: bytes
    requires_python: str
    yanked: str = ""

    @property
    def url(self) -> str:
        """Where its file is, from the page of its project."""
        # A + that is not quoted is a space to object stores.
        return f"../../../{FILES}/{urllib.parse.quote(self.name)}"

    @property
    def metadata_sha256(self) -> str:
        """The digest of the METADATA that lies beside it."""
        return digest.of_bytes(self.metadata)


def yanked(path: Path | None = None) -> dict[str, str]:
    """Patterns of the wheels that are yanked, and why. Raises BuildError for an entry that is not whole."""
    path, found = path or YANKED, {}
    content = toml.read(path)
    entries = content.get("yanked", [])
    if content.keys() - {"yanked"} or not isinstance(entries, list):
        raise BuildError(f"{path.name}: it is [[yanked]] tables and nothing else, not {', '.join(content)}")
    for entry in entries:
        if not isinstance(entry, dict):
            raise BuildError(f"{path.name}: an entry is a [[yanked]] table, not {entry!r}")
        texts = [isinstance(value, str) and value.strip() for value in entry.values()]
        if set(entry) != {"wheels", "reason"} or not all(texts):
            raise BuildError(f"{path.name}: an entry names `wheels` and a `reason`, this one {entry}")
        found[entry["wheels"]] = entry["reason"]
    return found


def read(path: Path, reasons: dict[str, str] | None = None) -> IndexedWheel:
    """Reads a wheel's own METADATA. `reasons`: as `yanked` gives them. Raises BuildError for a file that is none."""
    try:
        with archive.wheel(path) as opened:
            names = [n for n in opened.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n)]
            if len(names) != 1:
                raise ValueError(f"it has {len(names)} files *.dist-info/METADATA, not one")
            metadata = opened.read(names[0])
        head = metadata.decode().partition("\n\n")[0]
        fields = dict(line.partition(": ")[::2] for line in head.splitlines())
        if lacking := {"Name", "Version"} - set(fields):
            raise ValueError(f"its METADATA has no {min(lacking)}")
    except DAMAGED as error:
        raise BuildError(f"{path.name} is damaged, or no wheel: {error}") from None
    return IndexedWheel(
        name=path.name,
        project=fields["Name"],
        version=fields["Version"],
        sha256=digest.of_file(path),
        size=path.stat().st_size,
        metadata=metadata,
        requires_python=fields.get("Requires-Python", ""),
        yanked=next((why for p, why in (reasons or {}).items() if fnmatch.fnmatch(path.name, p)), ""),
    )


def roots(wheel: IndexedWheel) -> tuple[str, ...]:
    """The index roots that list a wheel: those of its accelerator in the matrix."""
    for accelerator in matrix.load().accelerators:
        if accelerator.distribution == wheel.project:
            return accelerator.roots
    return ()


def write(wheels: list[Path], target: Path, page: str = "") -> dict[str, list[IndexedWheel]]:
    """Writes the index of `wheels` into `target`: files/ and whl/<root>/, and `page`, for people, where a browser looks
    first. Returns the wheels by root; one of another project is in none. Beside them a root has an alias `apex` of each
    version (alias.py). What was there stays until the new one is whole. Raises BuildError for a damaged wheel, where
    no root would list any, and for a target that may not be replaced (`place`)."""
    by_root: dict[str, list[IndexedWheel]] = {r: [] for a in matrix.load().accelerators for r in a.roots}
    target = place(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f"{target.name}.lock")):  # one that is at work is none that was killed
        _sweep(target)
        _write(wheels, place(target), by_root, page)  # it may have come while this waited
    return by_root


def place(target: Path, dist: Path | None = None) -> Path:
    """Where an index at `target` lies, links followed: nothing, an empty folder, or an index, as all that is there is
    replaced. Raises BuildError for anything else, and for a folder that is, holds or lies in `dist` or holds the one
    that this runs in."""
    try:
        found = target.resolve()
    except (OSError, RuntimeError):
        raise BuildError(f"--target {target} is a link that leads to itself: name another folder") from None
    if dist is not None and (found.is_relative_to(dist.resolve()) or dist.resolve().is_relative_to(found)):
        raise BuildError(
            f"--target {target} is, holds or lies in --dist {dist}, and an index takes the place of all that its "
            "folder holds: name another --target"
        )
    if Path.cwd().is_relative_to(found):
        raise BuildError(
            f"--target {target} is, or holds, the folder that this runs in, and an index takes the place of "
            "it: run this from another one"
        )
    if strange := _strange(found):
        raise BuildError(
            f"--target {target} {strange}, and an index would take its place: name a new or an empty folder, or "
            "an index that build_matrix wrote; nothing was changed"
        )
    return found


def _strange(folder: Path) -> str:
    """What keeps a folder from being an index, or a place for one, in words; empty where nothing does."""
    if not folder.exists():
        return ""
    if not folder.is_dir():
        return "is no folder"
    found: set[str] = set()
    for root, folders, names in os.walk(folder, onerror=_raise):
        at = "" if root == str(folder) else f"{os.path.relpath(root, folder)}/"
        here = {f"{at}{name}/" for name in folders} | {at + name for name in names}
        if other := [name for name in here if not OWN.fullmatch(name) or (folder / name).is_symlink()]:
            return f"holds {min(other)!r}"  # a home folder is not read to its end
        found |= here
    page = any(name.endswith(f"/{JSON_PAGE}") for name in found)
    return "" if not found or ({f"{FILES}/", "whl/"} <= found and page) else "is no whole index"


def _raise(error: OSError) -> None:
    raise error  # a folder that cannot be read is none that is empty


def _sweep(target: Path) -> None:
    """Removes what writers that were killed left, and gives back the index of one killed between its two renames."""
    for left in target.parent.glob(f".{glob.escape(target.name)}-*.partial"):
        if left.is_symlink() or not left.is_dir() or {path.name for path in left.iterdir()} - {"new", "old"}:
            continue  # somebody else's, by such a name
        if not target.exists() and (left / "old").is_dir():
            (left / "old").rename(target)
        shutil.rmtree(left, ignore_errors=True)


def _write(wheels: list[Path], target: Path, by_root: dict[str, list[IndexedWheel]], page: str) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", suffix=".partial", dir=target.parent))
    try:
        new, reasons = scratch / "new", yanked()
        (new / FILES).mkdir(parents=True)
        for path in sorted(wheels):
            wheel = read(path, reasons)
            if not roots(wheel):
                continue
            shutil.copyfile(path, new / FILES / path.name)
            (new / FILES / f"{path.name}.metadata").write_bytes(wheel.metadata)
            for root in roots(wheel):
                by_root[root].append(wheel)
        if not any(by_root.values()):
            known = ", ".join(a.distribution for a in matrix.load().accelerators)
            raise BuildError(
                f"no wheel here is of {known}: the index would be empty, and what is there stays"
            )
        aliases = _write_aliases(by_root, new / FILES)
        for root, listed in by_root.items():
            _write_root(new / "whl" / root, root, [*listed, *aliases[root]])
        for folder in (new, new / "whl") if page else ():
            (folder / "index.html").write_text(page, encoding="utf-8")
        if target.exists():
            target.rename(scratch / "old")
        new.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_aliases(by_root: dict[str, list[IndexedWheel]], files: Path) -> dict[str, list[IndexedWheel]]:
    """Writes a wheel of the name apex (alias.py) for every version that a root lists, yanked where that is."""
    found: dict[str, list[IndexedWheel]] = {root: [] for root in by_root}
    for root, listed in by_root.items():
        for project, version in sorted({(wheel.project, wheel.version) for wheel in listed}):
            of = [wheel for wheel in listed if (wheel.project, wheel.version) == (project, version)]
            made = read(alias.write(files, project, version))
            (files / f"{made.name}.metadata").write_bytes(made.metadata)
            found[root].append(replace(made, yanked=of[0].yanked if all(w.yanked for w in of) else ""))
    return found


def _write_root(folder: Path, root: str, wheels: list[IndexedWheel]) -> None:
    projects = sorted({wheel.project for wheel in wheels})
    _write_page(
        folder,
        ROOT_PAGE.render(root=root, projects=projects),
        {"meta": {"api-version": "1.1"}, "projects": [{"name": project} for project in projects]},
    )
    for project in projects:
        files = [wheel for wheel in wheels if wheel.project == project]
        _write_page(
            folder / project, PROJECT_PAGE.render(project=project, files=files), _json(project, files)
        )


def _json(project: str, wheels: list[IndexedWheel]) -> dict:
    files = [
        {
            "filename": wheel.name,
            "url": wheel.url,
            "hashes": {"sha256": wheel.sha256},
            "size": wheel.size,
            "requires-python": wheel.requires_python,
            # By its new name alone (PEP 714): pip of 22.3 to 23.0, Debian 12's, fails on the old one in JSON.
            "core-metadata": {"sha256": wheel.metadata_sha256},
            "yanked": wheel.yanked or False,
        }
        for wheel in wheels
    ]
    versions = sorted({wheel.version for wheel in wheels})
    return {"meta": {"api-version": "1.1"}, "name": project, "versions": versions, "files": files}


def _write_page(folder: Path, page: str, value: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "index.html").write_text(page)
    (folder / JSON_PAGE).write_text(json.dumps(value, indent=1))
