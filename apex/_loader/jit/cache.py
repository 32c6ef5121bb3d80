"""The disk cache of compiled code.

An entry is one file named by its key: magic, digest of the payload, payload. It is verified whenever it is
read, so a damaged or truncated one counts as absent and is written again. Entries appear by rename, never
half-written. Processes that want the same entry wait for each other on a lock of the operating system, which
dies with its holder; the wait has an end, as two compilations do no harm. Without a folder that can be
written, code is compiled in memory; failures to read, lock or write are ignored for the same reason.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system: no lock, the rename suffices
    fcntl = None

_MAGIC = b"apex-code-1\n"
_LONGEST_WAIT = 120.0  # seconds; a holder may be stopped in a debugger


def folder():
    """Folder of the cache: APEX_CACHE_DIR, else apex/ in the user's cache folder; None without a home."""
    named = os.environ.get("APEX_CACHE_DIR")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    if base and os.path.isabs(base):
        return Path(base) / "apex"
    home = os.path.expanduser("~")
    return Path(home) / ".cache" / "apex" if os.path.isabs(home) else None


def key(**parts):
    """The name of an entry, from everything that its content depends on."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=list).encode()).hexdigest()


def fetch(key, make):
    """The payload of `key`: from disk, or made by `make()` and kept. Only `make` can raise."""
    place = folder()
    found = read(place, key)
    if found is not None:
        return found
    if not usable(place):
        return make()
    with _lock(place / f"{key}.lock"):
        found = read(place, key)  # another process or thread may have made it while this one waited
        if found is None:
            found = make()
            _write(place, key, found)
        return found


def read(place, key):
    """The verified payload, or None."""
    if place is None:
        return None
    try:
        data = (place / key).read_bytes()
    except OSError:
        return None
    head = len(_MAGIC)
    digest, payload = data[head : head + 32], data[head + 32 :]
    good = data[:head] == _MAGIC and hashlib.sha256(payload).digest() == digest
    return payload if good else None


def usable(place=None):
    """Whether entries can be written to `place` (default: the cache's folder); makes the folder."""
    place = place or folder()
    if place is None:
        return False
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(place, os.W_OK | os.X_OK)


def _write(place, key, payload):
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".partial-", delete=False) as file:
            temporary = file.name
            file.write(_MAGIC + hashlib.sha256(payload).digest() + payload)
        os.replace(temporary, place / key)
    except OSError:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
    _remove_abandoned(place)


def _remove_abandoned(place):
    """Deletes partial files that a killed process left an hour ago or earlier."""
    old = time.time() - 3600
    for path in place.glob(".partial-*"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < old:
                path.unlink()


@contextlib.contextmanager
def _lock(path):
    """Holds the lock on `path`, against threads too, if it can be had in time; else goes on without it."""
    if fcntl is None:
        yield
        return
    try:
        file = open(path, "ab")  # noqa: SIM115  closed below, which is what releases the lock
    except OSError:
        yield
        return
    with file:
        _wait_for(file)
        yield


def _wait_for(file):
    end = time.monotonic() + _LONGEST_WAIT
    pause = 0.002
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                return
        except OSError:  # a file system without locks
            return
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
