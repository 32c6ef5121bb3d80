"""Whether lines stay within 120 columns where no formatter looks: pages, shell scripts, workflows, schemas.

`python -m build_matrix.check.line_length` lists those that do not, and ends with 1. What cannot be broken may be
longer: a row of a table, a line with an address, what a program writes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from build_matrix import REPOSITORY

COLUMNS = 120
SUFFIXES = (".md", ".sh", ".yml", ".yaml", ".jinja", ".schemas", ".html", ".css", ".js")
WRITTEN = (".github/workflows/release.yml",)  # by a program


def too_long(path: Path) -> Iterator[int]:
    """The numbers, from 1, of lines that are too long and could be broken."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if len(line) > COLUMNS and not line.lstrip().startswith("|") and "://" not in line:
            yield number


def sources() -> list[str]:
    """Files of this checkout that are looked at, relative to it."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, encoding="utf-8", capture_output=True, check=True).stdout
    return [name for name in listed.splitlines() if name.endswith(SUFFIXES) and name not in WRITTEN]


def main() -> int:
    found = [f"{name}:{number}" for name in sources() for number in too_long(REPOSITORY / name)]
    for place in found:
        print(f"{place}: more than {COLUMNS} columns; break the line", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
