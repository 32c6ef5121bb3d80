"""Which bindings were loaded: under a slim torch (toolchains/slim_torch.py), those for aarch64 in an emulated process
(ci/aarch64_check.py). A file for each torch, Python and platform in build_matrix/receipts/loads, which counts for the
very sources that it was of."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from build_matrix import REPOSITORY
from build_matrix.spec import identity, matrix
from build_matrix.store import files

FOLDER = REPOSITORY / "build_matrix/receipts/loads"
GRADE = "loaded (slim torch)"
EMULATED = "loaded under qemu"
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
    folder.mkdir(parents=True, exist_ok=True)
    file = path(torch, python, folder, platform)
    files.write(file, json.dumps(value, indent=1) + "\n")
    return file


def grade(
    torch: str, python: str, bindings: str, folder: Path = FOLDER, platform: str = matrix.NATIVE
) -> str | None:
    """What is known of a binding whose sources have the digest `bindings`; None when nothing is."""
    file = path(torch, python, folder, platform)
    try:
        receipt = json.loads(file.read_text(encoding="utf-8"))
        return receipt["grade"] if receipt["bindings"] == bindings else None
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        log.warning("what %s says of a binding does not count: %r", file.name, error)
        return None
