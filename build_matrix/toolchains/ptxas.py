"""Reads what `ptxas -v` says: spilled bytes per kernel."""

from __future__ import annotations

import re

FUNCTION = re.compile(r"Function properties for (\S+)")
SPILLS = re.compile(r"(\d+) bytes spill stores")


def spills(log: str) -> dict[str, int]:
    """Bytes of spill stores a thread, by kernel."""
    found: dict[str, int] = {}
    kernel = None
    for line in log.splitlines():
        if match := FUNCTION.search(line):
            kernel = match[1]
        elif kernel and (match := SPILLS.search(line)):
            found[kernel], kernel = int(match[1]), None
    return found
