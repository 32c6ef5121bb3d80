"""Which bindings were loaded under a slim torch (toolchains/slim_torch.py): a file for each torch and Python in
build_matrix/receipts/loads, which counts for the very sources that it was of."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from build_matrix import REPOSITORY
from build_matrix.spec import identity
from build_matrix.store import files

FOLDER = REPOSITORY / "build_matrix/receipts/loads"
GRADE = "loaded (slim torch)"
log = logging.getLogger(__name__)


def path(torch: str, python: str, folder: Path = FOLDER) -> Path:
    """Where the receipt of a torch release and a Python (cp311) lies, if there is one."""
    return folder / f"torch-{torch}-{python}.json"


def write(torch: str, python: str, bindings: str, folder: Path = FOLDER) -> Path:
    """Writes down that the binding of sources with the digest `bindings` was loaded. Returns the file."""
    value = {
        "torch": torch,
        "python": python,
        "apex": identity.version(),
        "bindings": bindings,
        "grade": GRADE,
    }
    folder.mkdir(parents=True, exist_ok=True)
    files.write(path(torch, python, folder), json.dumps(value, indent=1) + "\n")
    return path(torch, python, folder)


def grade(torch: str, python: str, bindings: str, folder: Path = FOLDER) -> str | None:
    """What is known of a binding whose sources have the digest `bindings`; None when nothing is."""
    file = path(torch, python, folder)
    try:
        receipt = json.loads(file.read_text(encoding="utf-8"))
        return receipt["grade"] if receipt["bindings"] == bindings else None
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        log.warning("what %s says of a binding does not count: %r", file.name, error)
        return None
