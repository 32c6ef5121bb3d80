"""Outputs of work units, kept by the hash of everything that went in. A unit whose hash is stored is not run
again."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock

from build_matrix import REPOSITORY, digest

RECORD = "unit.json"


def default_root() -> Path:
    """APEX_STORE, else build/store of this checkout, so that `make clean` forgets everything."""
    return Path(os.environ.get("APEX_STORE") or REPOSITORY / "build/store")


@dataclass(frozen=True)
class WorkUnit:
    """One thing to build. `inputs` is all that its output depends on; `make` fills an empty folder."""

    kind: str
    name: str
    inputs: dict[str, object]
    make: Callable[[Path], None] = field(compare=False, repr=False)

    @property
    def key(self) -> str:
        return digest.of_values({"kind": self.kind, "name": self.name, "inputs": self.inputs})


@dataclass(frozen=True)
class Result:
    """Where a unit's output lies, and what it cost (when it was made, and now)."""

    unit: WorkUnit
    folder: Path
    seconds: float
    size: int
    stored: bool


class Store:
    """A folder of outputs: <root>/<kind>/<key>/. Complete outputs appear by rename, so a killed build leaves
    none that is half made. Safe for several threads and processes."""

    def __init__(self, root: Path | None = None):
        self.root = Path(root or default_root())

    def folder(self, unit: WorkUnit) -> Path:
        return self.root / unit.kind / unit.key[:40]

    def build(self, unit: WorkUnit) -> Result:
        """The unit's output, made now if it is not stored. Whatever `unit.make` raises passes through."""
        folder = self.folder(unit)
        record = _record(folder)
        if record is None:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{folder}.lock"):
                record = _record(folder)
                if record is None:
                    return self._make(unit, folder)
        return Result(unit, folder, record["seconds"], record["bytes"], stored=True)

    def _make(self, unit: WorkUnit, folder: Path) -> Result:
        prefix = f".partial-{folder.name}-"
        for left in folder.parent.glob(f"{prefix}*"):  # by a build that was killed: the lock is ours
            shutil.rmtree(left, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
        try:
            start = time.monotonic()
            unit.make(partial)
            seconds = round(time.monotonic() - start, 3)
            size = _size(partial)
            record = {
                "kind": unit.kind,
                "name": unit.name,
                "inputs": unit.inputs,
                "seconds": seconds,
                "bytes": size,
            }
            (partial / RECORD).write_text(json.dumps(record, indent=1, sort_keys=True))
            partial.chmod(0o755)
            shutil.rmtree(folder, ignore_errors=True)  # a torn one
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return Result(unit, folder, seconds, size, stored=False)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != RECORD)


def _record(folder: Path) -> dict | None:
    """What a stored unit says of itself; None where it is missing, cannot be read, or files were lost or cut."""
    try:
        record = json.loads((folder / RECORD).read_text())
        return record if record["bytes"] == _size(folder) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


class DigestCache:
    """Digests of big files (compilers), remembered by path, size and time of change."""

    def __init__(self, root: Path | None = None):
        self.path = Path(root or default_root()) / "digests.json"
        try:
            self.known = json.loads(self.path.read_text())
        except (OSError, ValueError):
            self.known = {}

    def of_files(self, paths: list[Path]) -> str:
        """One digest for the contents of all `paths`; sorted by content, so that folders do not count."""
        stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(paths)]
        name = digest.of_values(stats)
        if name not in self.known:
            self.known[name] = digest.of_values(sorted(digest.of_file(path) for path in paths))
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.path}.lock"):
                partial = self.path.with_suffix(f".{os.getpid()}")
                partial.write_text(json.dumps(self.known))
                partial.replace(self.path)
        return self.known[name]
