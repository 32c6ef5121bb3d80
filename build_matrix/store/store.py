"""Outputs of work units, kept by the hash of everything that went in. A unit whose hash is stored is not run
again."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from build_matrix import REPOSITORY
from build_matrix.errors import CompileError, StoreError
from build_matrix.store import digest, files, foreign

if TYPE_CHECKING:
    from build_matrix.store.remote import Remote

RECORD = "unit.json"
JOURNAL = "journal.jsonl"  # one line a unit that was made, ever: what the farm learns costs from
LITTLE = 16 * 1024  # bytes: a disk that has no more is full
URL = re.compile(r"\w[\w+.-]*:/")  # with one slash it is one that was typed wrongly
log = logging.getLogger(__name__)


def default_root() -> Path:
    """APEX_STORE, else build/store of this checkout, so that `make clean` forgets everything. Raises StoreError for a
    URL, which would be a folder called s3: here."""
    named = os.environ.get("APEX_STORE", "")
    if URL.match(named):
        raise StoreError(
            named, "APEX_STORE names a folder of this machine, and --store a URL: nothing can be kept"
        )
    return Path(os.path.expanduser(named) or REPOSITORY / "build/store")


@dataclass(frozen=True)
class WorkUnit:
    """One thing to build. `inputs` is all that its output depends on; `make` fills an empty folder."""

    kind: str
    name: str
    inputs: dict[str, object]
    make: Callable[[Path], None] = field(compare=False, repr=False)

    @property
    def key(self) -> str:
        """The digest of all that its output depends on."""
        return digest.of_values({"kind": self.kind, "name": self.name, "inputs": self.inputs})


@dataclass(frozen=True)
class Result:
    """Where a unit's output lies, and what it cost (when it was made, and now)."""

    unit: WorkUnit
    folder: Path
    seconds: float
    size: int
    stored: bool

    @property
    def kind(self) -> str:
        return self.unit.kind

    @property
    def name(self) -> str:
        return self.unit.name

    @property
    def key(self) -> str:
        return self.unit.key


class Store:
    """A folder of outputs: <root>/<kind>/<key>/. Complete outputs appear by rename, so a killed build leaves
    none that is half made, and each is compared with its digest before it is used. Safe for several threads
    and processes. With `shared` (remote.Remote), what is not here is looked for there, and what is made here
    goes there too."""

    _sound: ClassVar[dict[Path, str]] = {}  # outputs whose digest was found right, with their files' stats

    def __init__(self, root: Path | None = None, shared: Remote | None = None):
        self.root = Path(root or default_root()).absolute()  # workers have working folders of their own
        self.shared = shared

    @classmethod
    def at(cls, place: str) -> Store:
        """The store at `place`: a folder, or a URL that this machine's own folder stands before."""
        if not URL.match(place):
            return cls(Path(place))
        from build_matrix.store.remote import Remote

        return cls(default_root(), Remote(place))

    def check(self) -> None:
        """Raises StoreError where nothing can be kept here, or in the shared store: before anything is begun."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root):
                pass
        except OSError as error:
            raise StoreError(self.root, f"nothing can be written ({error.strerror})") from error
        if self.shared is not None:
            self.shared.check()

    @property
    def place(self) -> str:
        """What `at` takes, on any machine that sees the same store."""
        return self.shared.address if self.shared else str(self.root)

    def output(self, kind: str, key: str) -> Path:
        """The folder of an output whose unit is not at hand. Raises StoreError when the store has none that is
        whole."""
        folder = self.root / kind / key[:40]
        if self._record(folder) is None and not self._fetch(kind, folder):
            raise StoreError(self.place, f"there is no {kind}/{folder.name}")
        return folder

    def folder(self, unit: WorkUnit) -> Path:
        """Where the output of a unit lies, or would."""
        return self.root / unit.kind / unit.key[:40]

    def find(self, unit: WorkUnit) -> Result | None:
        """The unit's output, if it is stored and whole."""
        folder = self.folder(unit)
        record = self._record(folder)
        if record is None and self._fetch(unit.kind, folder):
            record = self._record(folder)
        if record is None:
            return None
        return Result(unit, folder, record["seconds"], record["bytes"], stored=True)

    def build(self, unit: WorkUnit) -> Result:
        """The unit's output, made now if it is not stored. Whatever `unit.make` raises passes through; raises
        StoreError where the disk is full."""
        found, folder = self.find(unit), self.folder(unit)
        if found is None:
            try:
                folder.parent.mkdir(parents=True, exist_ok=True)
                with files.lock(f"{folder}.lock"):
                    found = self.find(unit) or self._make(unit, folder)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise StoreError(self.root, f"no space is left for {unit.kind} {unit.name}") from error
                raise
        if self.shared is not None and not self.shared.has(unit.kind, folder.name):
            self.shared.give(unit.kind, folder.name, folder)
        return found

    def _fetch(self, kind: str, folder: Path) -> bool:
        """Whether the shared store gave a whole output, which is here now."""
        if self.shared is None:
            return False
        folder.parent.mkdir(parents=True, exist_ok=True)
        with files.lock(f"{folder}.fetch"):
            if self._record(folder) is not None:
                return True
            partial = _partial(folder, "fetched")
            try:
                if not self.shared.take(kind, folder.name, partial) or not self._is(
                    partial, kind, folder.name
                ):
                    return False
                partial.chmod(0o755)
                shutil.rmtree(folder, ignore_errors=True)
                partial.rename(folder)
                return True
            finally:
                shutil.rmtree(partial, ignore_errors=True)

    def _is(self, folder: Path, kind: str, key: str) -> bool:
        """Whether a folder is the whole output of that key: another one under its name is told."""
        if (record := self._record(folder)) is None:
            return False
        found = digest.of_values({part: record.get(part) for part in ("kind", "name", "inputs")})
        if record.get("kind") == kind and found.startswith(key):
            return True
        log.warning("%s/%s in %s is the output of another unit, and is made again", kind, key, self.place)
        return False

    def _make(self, unit: WorkUnit, folder: Path) -> Result:
        partial = _partial(folder, "partial")  # the lock is ours
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
                "digest": _digest(partial),
            }
            (partial / RECORD).write_text(json.dumps(record, indent=1, sort_keys=True))
            partial.chmod(0o755)
            by = f"{socket.gethostname()} {os.getpid()}"
            # Before it appears: what is stored has its line, wherever a kill comes.
            self.note(
                {"kind": unit.kind, "name": unit.name, "key": folder.name, "seconds": seconds, "by": by}
            )
            shutil.rmtree(folder, ignore_errors=True)  # a torn one
            partial.rename(folder)
        except BaseException as error:
            full = self._full(unit, error.log) if isinstance(error, CompileError) else None
            shutil.rmtree(partial, ignore_errors=True)
            if full:
                raise full from error
            raise
        self._sound[folder] = _stats(folder)
        return Result(unit, folder, seconds, size, stored=False)

    def _full(self, unit: WorkUnit, log: str) -> StoreError | None:
        """The fault of a compiler that failed for want of space, here or where it puts its own files."""
        said = [line for line in log.splitlines() if os.strerror(errno.ENOSPC) in line]
        for place, variable in ((self.root, "APEX_STORE"), (Path(tempfile.gettempdir()), "TMPDIR")):
            if any(str(place) in line for line in said) or shutil.disk_usage(place).free < LITTLE:
                return StoreError(place, f"no space is left for {unit.kind} {unit.name}", variable)
        return None

    def note(self, line: dict) -> None:
        """A short line is appended whole, whoever else appends."""
        self.root.mkdir(parents=True, exist_ok=True)
        with open(self.root / JOURNAL, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def journal(self) -> list[dict]:
        """Every unit that was made here, oldest first: kind, name, key, seconds, and by which host and process."""
        try:
            lines = (self.root / JOURNAL).read_text(encoding="utf-8").splitlines()
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue  # cut by a kill
        return found

    def _record(self, folder: Path) -> dict | None:
        """What a stored unit says of itself; None where it is missing or not what was stored, which is
        told."""
        try:
            record = foreign.read(folder / RECORD)
            if not isinstance(record, dict) or not {"bytes", "seconds"} <= set(record):
                raise ValueError(f"{RECORD} does not say what it is")
            stats = _stats(folder)
            if self._sound.get(folder) != stats:
                if record["bytes"] != _size(folder):
                    raise ValueError("files are missing or cut")
                # Records of before 1.10 hold no digest.
                if record.get("digest", have := _digest(folder)) != have:
                    raise ValueError(f"its digest is {have}, not {record['digest']}")
                self._sound[folder] = stats
            return record
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("the stored %s is damaged and is made again: %s", folder, error)
            return None


def _size(folder: Path) -> int:
    return sum(os.stat(path).st_size for _, path in _files(folder))


def _partial(folder: Path, what: str) -> Path:
    """A new folder beside `folder`; those that killed builds left go."""
    prefix = f".{what}-{folder.name}-"
    for left in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))


def _files(folder: Path) -> list[tuple[str, str]]:
    """(name, path) of every file of an output but its record."""
    return [pair for pair in digest.files(folder) if pair[0].rpartition("/")[2] != RECORD]


def _digest(folder: Path) -> str:
    """One digest of every name and content."""
    return digest.of_values([(name, digest.of_file(path)) for name, path in _files(folder)])


def _stats(folder: Path) -> str:
    """Changes whenever a file was written."""
    stats = [(path, (stat := os.stat(path)).st_size, stat.st_mtime_ns) for _, path in _files(folder)]
    return digest.of_values(stats)


class DigestCache:
    """Digests of big files (compilers), remembered by path, size and time of change."""

    def __init__(self, root: Path | None = None):
        self.path = Path(root or default_root()) / "digests.json"
        try:
            known = foreign.read(self.path)
        except (OSError, ValueError):
            known = {}
        self.known = known if isinstance(known, dict) else {}

    def of_files(self, paths: list[Path]) -> str:
        """One digest for the contents of all `paths`; sorted by content, so that folders do not count."""
        stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(paths)]
        name = digest.of_values(stats)
        if name not in self.known:
            self.known[name] = digest.of_values(sorted(digest.of_file(path) for path in paths))
            Store(self.path.parent).check()
            with files.lock(f"{self.path}.lock"):
                files.write(self.path, json.dumps(self.known))
        return self.known[name]
