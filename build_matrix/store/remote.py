"""A store that machines share: any place that fsspec can write to, s3://bucket/prefix among them.

An output is one archive, <kind>/<key>.tar.gz, written whole: an object store shows an object only when it is
complete, and in a folder the archive appears by a rename. What comes from there is compared with its digest by the
local store, like anything else.
"""

from __future__ import annotations

import logging
import os
import tarfile
import uuid
import zlib
from pathlib import Path

from build_matrix.errors import RequirementMissing, StoreError
from build_matrix.store import archive, files

# Whoever makes the same unit at the same time writes the same contents: no lock is needed.
PACKED = ".tar.gz"
WRITABLE = ".writable"  # an empty object that tells so; one for all, since not everybody may delete
log = logging.getLogger(__name__)


class Remote:
    """`address` is a URL of fsspec. Its credentials come from the environment, as its own tools take them
    (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...)."""

    def __init__(self, address: str):
        import fsspec

        self.address = address.rstrip("/")
        if "://" not in address:
            raise StoreError(address, "a URL has two slashes after its protocol: nothing can be kept")
        try:
            self.system, self.path = fsspec.core.url_to_fs(self.address)
        except ImportError as error:  # it says which package it wants: s3fs, gcsfs, ...
            remedy = "pip install s3fs" if address.startswith("s3") else "pip install what it names"
            raise RequirementMissing(f"a package ({error})", f"the store {address}", remedy) from None
        except (ValueError, TypeError, OSError) as error:  # TypeError: it wants more than an address
            raise StoreError(address, str(error)) from None
        self.folder = "file" in self.system.protocol or "local" in self.system.protocol
        if "memory" in self.system.protocol:
            raise StoreError(
                address, "the memory of one process is nothing that others see: nothing can be shared"
            )

    def _fault(self, what: str, error: Exception) -> StoreError:
        return StoreError(self.address, f"{what} ({_words(error)})")

    def _name(self, kind: str, key: str) -> str:
        return f"{self.path}/{kind}/{key}{PACKED}"

    def check(self) -> None:
        """Raises StoreError when nothing can be asked or kept there: no answer, no such bucket, no right to write."""
        try:
            self.system.exists(f"{self.path}/unit.json")
            if "s3" in self.system.protocol:
                self.system.info(self.path.partition("/")[0])
        except PermissionError:
            pass  # whoever has a prefix alone may not ask for the bucket
        except Exception as error:  # each file system has exceptions of its own
            raise self._fault("nothing can be looked up", error) from error
        try:
            if self.folder:
                self.system.makedirs(self.path, exist_ok=True)
            self.system.pipe_file(f"{self.path}/{WRITABLE}", b"")
        except Exception as error:
            raise self._fault("nothing can be written", error) from error

    def has(self, kind: str, key: str) -> bool:
        """Whether an output is there. Raises StoreError when the place cannot be asked."""
        try:
            self.system.invalidate_cache()
            return self.system.exists(self._name(kind, key))
        except Exception as error:
            raise self._fault(f"{kind}/{key} cannot be looked up", error) from error

    def take(self, kind: str, key: str, target: Path) -> bool:
        """Unpacks an output into the empty folder `target`. False when it is not there, or is no whole archive,
        which is told. Raises StoreError when the place cannot be read."""
        if not self.has(kind, key):
            return False
        with files.temporary("store") as folder:
            packed = folder / "output"
            try:
                self.system.get_file(self._name(kind, key), str(packed))
            except Exception as error:
                raise self._fault(f"{kind}/{key} cannot be read", error) from error
            try:
                archive.unpack_tar(packed, target)
            except (OSError, EOFError, ValueError, zlib.error, tarfile.TarError) as error:
                log.warning("%s/%s in %s is damaged: %s", kind, key, self.address, _words(error))
                return False
        return True

    def give(self, kind: str, key: str, folder: Path) -> None:
        """Packs an output and puts it there. Raises StoreError."""
        with files.temporary("store") as place:
            packed = place / "output"
            # Links become files: `take` takes nothing else.
            with tarfile.open(packed, "w:gz", compresslevel=1, dereference=True) as made:
                made.add(folder, arcname=".")
            name = self._name(kind, key)
            try:
                if self.folder:
                    partial = f"{name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.partial"
                    self.system.makedirs(str(Path(name).parent), exist_ok=True)
                    self.system.put_file(str(packed), partial)
                    os.replace(partial, name)
                else:
                    self.system.put_file(str(packed), name)
            except Exception as error:
                raise self._fault(f"{kind}/{key} cannot be written", error) from error


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
