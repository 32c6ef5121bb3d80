"""Which bindings were loaded: under a slim torch (toolchains/slim_torch.py), those for aarch64 in an emulated process
(ci/aarch64_check.py), and which libraries for Windows under wine (toolchains/wine.py). A file for each torch, Python
and platform in build_matrix/receipts/loads, which counts for the very sources that it was of."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from build_matrix import REPOSITORY
from build_matrix.spec import identity, matrix
from build_matrix.store import files, foreign

FOLDER = REPOSITORY / "build_matrix/receipts/loads"
GRADE = "loaded (slim torch)"
EMULATED = "loaded under qemu"
UNDER_WINE = "loaded under wine"  # which is no Windows
NEVER = "linked, never loaded"
log = logging.getLogger(__name__)


def path(torch: str, python: str, folder: Path = FOLDER, platform: str = matrix.NATIVE) -> Path:
    """Where the receipt of a torch release, a Python (cp311) and a platform lies, if there is one."""
    other = "" if platform == matrix.NATIVE else f"-{platform}"
    return folder / f"torch-{torch}-{python}{other}.json"


def write(
    torch: str, python: str, bindings: str, folder: Path = FOLDER, platform: str = matrix.NATIVE
) -> Path:
    """Writes down that the binding of sources with the digest `bindings` was loaded. Returns the file."""
    value = {
        "torch": torch,
        "python": python,
        "apex": identity.version(),
        "bindings": bindings,
        "grade": GRADE if platform == matrix.NATIVE else EMULATED,
    }
    return _write(value, path(torch, python, folder, platform))


def grade(
    torch: str, python: str, bindings: str, folder: Path = FOLDER, platform: str = matrix.NATIVE
) -> str | None:
    """What is known of a binding whose sources have the digest `bindings`; None when nothing is."""
    return _grade(path(torch, python, folder, platform), "bindings", bindings)


def library_path(platform: str, folder: Path = FOLDER) -> Path:
    """Where the receipt of a platform's host library lies, if there is one."""
    return folder / f"library-{platform}.json"


def write_library(platform: str, library: str, folder: Path = FOLDER) -> Path:
    """Writes down that a platform's library of sources with the digest `library` was loaded under wine. Returns the
    file."""
    value = {"platform": platform, "apex": identity.version(), "library": library, "grade": UNDER_WINE}
    return _write(value, library_path(platform, folder))


def library_grade(platform: str, library: str, folder: Path = FOLDER) -> str | None:
    """What is known of a platform's host library whose sources have the digest `library`; None when nothing is."""
    return _grade(library_path(platform, folder), "library", library)


def _write(value: dict[str, str], file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    files.write(file, json.dumps(value, indent=1) + "\n")
    return file


def _grade(file: Path, of: str, digest: str) -> str | None:
    try:
        receipt = foreign.read(file)
        if receipt["grade"] not in (GRADE, EMULATED, UNDER_WINE):
            raise ValueError(f"{receipt['grade']!r} is no grade")
        return receipt["grade"] if receipt[of] == digest else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("what %s says does not count: %r", file.name, error)
        return None
