"""The device sources, read into memory: the compilers get every header from there and search no folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

from apex._loader import layout
from apex._loader.errors import InstallationError


def read(unit: str) -> tuple[bytes, dict[str, bytes]]:
    """(source of `unit`, {header name: text}), bytes each. Raises InstallationError if they are not
    installed."""
    folder = layout.device_sources()
    file = folder / f"{unit}.cu" if folder else None
    if folder is None or file is None or not os.path.isfile(file):
        raise InstallationError(
            f"the device source of {unit} is not installed",
            wanted=f"{unit}.cu",
            found=str(folder or layout.built()),
        )
    return layout.read_bytes(file), {
        path.name: layout.read_bytes(path) for path in sorted(folder.glob("*.h"))
    }


def digest(source: bytes, headers: Mapping[str, bytes]) -> str:
    """SHA-256, in hex, over the source and all headers with their names."""
    total = hashlib.sha256()
    for name, text in (("", source), *sorted(headers.items())):
        for part in (name.encode(), text):
            total.update(len(part).to_bytes(8, "little"))
            total.update(part)
    return total.hexdigest()
