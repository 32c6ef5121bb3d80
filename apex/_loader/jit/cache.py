"""The disk cache of compiled code.

An entry is one file named by its key: magic, digest of the payload, payload. It is verified whenever it is
read, so a damaged or truncated one counts as absent and is written again. Entries appear by rename, never
half-written. Processes that want the same entry wait for each other on a lock of the operating system, which
dies with its holder; the wait has an end, as two compilations do no harm. Without a folder that can be
written, code is compiled in memory; failures to read, lock or write are ignored for the same reason.

What is read here is run. So a folder and an entry count only when they are this user's or root's and nobody else can
write them; an entry must be a regular file. Anything else is passed over with a warning that says why.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from apex._loader import system

try:
    import fcntl
except ImportError:  # not a POSIX system: whose a file is cannot be told, and nothing is kept
    fcntl = None  # type: ignore[assignment]

_MAGIC = b"apex-code-1\n"
_LONGEST_WAIT = 120.0  # seconds; a holder may be stopped in a debugger
# A link is not followed, and a FIFO that nobody writes is opened at once.
_CAREFUL = 0 if fcntl is None else os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def folder() -> Path | None:
    """Folder of the cache: APEX_CACHE_DIR, else apex/ in the user's cache folder; None without a home."""
    named = os.environ.get("APEX_CACHE_DIR")
    if named:
        return Path(os.path.expanduser(named))  # no shell has, where a file of variables says ~
    base = os.environ.get("XDG_CACHE_HOME")
    if base and os.path.isabs(base):
        return Path(base) / "apex"
    home = os.path.expanduser("~")
    # An empty HOME reads as the root folder, and one that does not exist is nobody's to make.
    there = os.environ.get("HOME") != "" and os.path.isabs(home) and os.path.isdir(home)
    return Path(home) / ".cache" / "apex" if there else None


def key(**parts: Any) -> str:
    """The name of an entry, from everything that its content depends on."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=list).encode()).hexdigest()


def fetch(key: str, make: Callable[[], bytes]) -> bytes:
    """The payload of `key`: from disk, or made by `make()` and kept. Only `make` can raise."""
    place = folder()
    with _opened(place, create=True) as (opened, refused):
        if refused:
            _warn(refused)
        if place is None or opened is None:
            return make()
        found = _read(place, opened, key)
        if found is not None:
            return found
        if not _writable(opened):
            return make()
        with _lock(opened, f"{key}.lock"):
            found = _read(place, opened, key)  # another process or thread may have made it meanwhile
            if found is None:
                found = make()
                _write(opened, key, found)
            return found


def refusal() -> str:
    """Why the cache's folder is not trusted, in words; empty when it is, or is not there."""
    if fcntl is None:
        return system.OWNERLESS
    with _opened(folder(), create=False) as (_, refused):
        return refused


def usable() -> bool:
    """Whether entries can be written to the cache's folder, or it could be made. Makes nothing: a diagnosis asks."""
    place = folder()
    with _opened(place, create=False) as (opened, _):
        if opened is not None:
            return _writable(opened)
    if place is None or fcntl is None or os.path.lexists(place):
        return False
    above = next(parent for parent in place.absolute().parents if os.path.lexists(parent))
    return os.path.isdir(above) and os.access(above, os.W_OK | os.X_OK)


@contextlib.contextmanager
def _opened(place: Path | None, create: bool) -> Iterator[tuple[int | None, str]]:
    """(descriptor of the folder or None, why it is refused). Entries are opened by way of the descriptor, so that they
    are of the folder that was looked at."""
    opened, refused = None, ""
    if place is not None and fcntl is not None:
        with contextlib.suppress(OSError):
            if create:
                place.mkdir(mode=0o700, parents=True, exist_ok=True)
            opened = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if opened is not None and (fault := _fault(os.fstat(opened))):
            refused = (
                f"the cache {place} {fault}: nothing is read from it or kept there. APEX_CACHE_DIR names another, "
                f"which is yours alone (chmod 700)"
            )
        yield (None if refused else opened), refused
    finally:
        if opened is not None:
            os.close(opened)


def _fault(found: os.stat_result) -> str:
    """Why another user could have written what has this os.stat_result; empty where none could."""
    if found.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {found.st_uid}"
    return "can be written by other users" if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""


def _writable(opened: int) -> bool:
    return os.access(".", os.W_OK | os.X_OK, dir_fd=opened)


def _warn(text: str) -> None:
    warnings.warn(f"apex: {text}", RuntimeWarning, stacklevel=2)


def _read(place: Path, opened: int, key: str) -> bytes | None:
    """The verified payload, or None."""
    try:
        entry = os.open(key, os.O_RDONLY | _CAREFUL, dir_fd=opened)
    except FileNotFoundError:
        return None
    except OSError as error:  # a link, a socket, or no right to read
        _warn(f"{place / key} is passed over: {error.strerror}")
        return None
    with open(entry, "rb") as file:
        found = os.fstat(entry)
        fault = _fault(found) if stat.S_ISREG(found.st_mode) else "is no regular file"
        if fault:
            _warn(f"{place / key} {fault}: it is passed over")
            return None
        try:
            data = file.read()
        except OSError:
            return None
    head = len(_MAGIC)
    digest, payload = data[head : head + 32], data[head + 32 :]
    good = data[:head] == _MAGIC and hashlib.sha256(payload).digest() == digest
    return payload if good else None


def _write(opened: int, key: str, payload: bytes) -> None:
    partial = f".partial-{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CAREFUL
    with contextlib.suppress(OSError):
        try:
            with open(os.open(partial, flags, 0o600, dir_fd=opened), "wb") as file:
                file.write(_MAGIC + hashlib.sha256(payload).digest() + payload)
            os.replace(partial, key, src_dir_fd=opened, dst_dir_fd=opened)
        except OSError:
            os.unlink(partial, dir_fd=opened)
    _remove_abandoned(opened)


def _remove_abandoned(opened: int) -> None:
    """Deletes partial files that a killed process left an hour ago or earlier."""
    old = time.time() - 3600
    for name in os.listdir(opened):
        if name.startswith(".partial-"):
            with contextlib.suppress(OSError):
                if os.stat(name, dir_fd=opened, follow_symlinks=False).st_mtime < old:
                    os.unlink(name, dir_fd=opened)


@contextlib.contextmanager
def _lock(opened: int, name: str) -> Iterator[None]:
    """Holds the lock `name`, against threads too, if it can be had in time; else goes on without it."""
    try:
        lock = os.open(name, os.O_RDWR | os.O_CREAT | _CAREFUL, 0o600, dir_fd=opened)
    except OSError:
        yield
        return
    with open(lock, "rb", buffering=0):
        if stat.S_ISREG(os.fstat(lock).st_mode):
            _wait_for(lock)
        yield


def _wait_for(lock: int) -> None:
    end = time.monotonic() + _LONGEST_WAIT
    pause = 0.002
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                return
        except OSError:  # a file system without locks
            return
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
