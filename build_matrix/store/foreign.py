"""JSON that others wrote, read so that nothing in it keeps the reader waiting or breaks it: a FIFO, a file without end,
lists in lists without end, numbers that JSON does not have. Standard library alone."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from pathlib import Path

LARGEST = 64 << 20  # bytes: the largest receipt, record or envelope has a thousandth
DEEPEST = 50


def read(path: Path) -> object:
    """What a JSON file says. Raises OSError where it cannot be read or is no regular file, ValueError for contents that
    are not to be taken."""
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would be waited for
    try:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        with open(opened, "rb", closefd=False) as file:
            data = file.read(LARGEST + 1)
    finally:
        os.close(opened)
    if len(data) > LARGEST:
        raise ValueError(f"it is larger than {LARGEST >> 20} MB")
    return value(data.decode())


def value(text: str | bytes) -> object:
    """What a JSON text says. Raises ValueError for one that is cut, nested deeper than DEEPEST, or with a number that
    is none."""
    try:
        found = json.loads(text, parse_constant=_number, parse_float=_number)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    level = [found]
    for _ in range(DEEPEST):
        level = [inner for outer in level for inner in _inside(outer)]
    if level:
        raise ValueError("it is nested too deep")
    return found


def _inside(outer: object) -> list:
    return list(outer.values()) if isinstance(outer, dict) else outer if isinstance(outer, list) else []


def _number(text: str) -> float:
    if math.isfinite(found := float(text)):
        return found
    raise ValueError(f"{text} is no number of JSON")
