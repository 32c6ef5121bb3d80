"""SHA-256 of files, texts and source closures."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)


def of_bytes(data: bytes) -> str:
    """SHA-256, in hex."""
    return hashlib.sha256(data).hexdigest()


def of_file(path: Path | str) -> str:
    """SHA-256 of a file's contents, in hex."""
    with open(path, "rb") as file:
        return (
            hashlib.file_digest(file, "sha256").hexdigest()
            if hasattr(hashlib, "file_digest")
            else _chunked(file)
        )


def _chunked(file) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def files(folder: Path) -> list[tuple[str, str]]:
    """(name in the folder, path) of every file under it, in the order in which paths sort. Torch's headers are ten
    thousand: no Path is made of them."""
    found = []

    def walk(place: str, prefix: str) -> None:
        with os.scandir(place) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    walk(entry.path, f"{prefix}{entry.name}/")
                elif entry.is_file():
                    found.append((prefix + entry.name, entry.path))

    walk(str(folder), "")
    return sorted(found, key=lambda pair: pair[0].split("/"))


def of_values(values: object) -> str:
    """Digest of anything JSON can say; the order of keys does not count."""
    return of_bytes(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())


def reach(sources: Iterable[Path], folders: Sequence[Path] = (), seen: set[Path] | None = None) -> list[Path]:
    """Sources and everything that they include by quotes that is found beside what includes it or in `folders`, each
    once, but for what is `seen`, to which they are added."""
    seen = set() if seen is None else seen
    found: list[Path] = []
    waiting = [source.resolve() for source in sources]
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        found.append(path)
        for name in INCLUDE.findall(path.read_text(encoding="utf-8")):
            for folder in [path.parent, *folders]:
                if (folder / name).is_file():
                    waiting.append((folder / name).resolve())
                    break
    return found


def closure(source: Path, folders: Sequence[Path] = ()) -> dict[str, Path]:
    """What `source` reaches. Keys are paths relative to the source's folder, so the same files give the same keys
    wherever they lie."""
    root = source.resolve().parent
    return dict(sorted((os.path.relpath(path, root), path) for path in reach([source], folders)))


def of_source(source: Path, folders: Sequence[Path] = ()) -> str:
    """Digest of a source with all its own headers: the sorted pairs (relative path, digest)."""
    return of_values({name: of_file(path) for name, path in closure(source, folders).items()})
