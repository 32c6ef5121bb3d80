"""A static package index: one root an accelerator build of torch (whl/cpu/, whl/cu130/, whl/rocm7.2/), pages
of PEP 503 and PEP 691, yanked wheels (PEP 592), and the metadata of each wheel beside it (PEP 658, 714). Any web server
can serve the folder."""

from __future__ import annotations

import fnmatch
import json
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
    for entry in toml.read(path).get("yanked", []):
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
    version (alias.py). What was there stays until the new one is whole. Raises BuildError for a damaged wheel, and
    where no root would list any."""
    by_root: dict[str, list[IndexedWheel]] = {r: [] for a in matrix.load().accelerators for r in a.roots}
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f"{target.name}.lock")):  # one that is at work is none that was killed
        _write(wheels, target, by_root, page)
    return by_root


def _write(wheels: list[Path], target: Path, by_root: dict[str, list[IndexedWheel]], page: str) -> None:
    for left in target.parent.glob(f".{target.name}-*.partial"):  # of one that was killed
        if not target.exists() and (left / "old").is_dir():  # between its two renames
            (left / "old").rename(target)
        shutil.rmtree(left, ignore_errors=True)
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
