"""`python -m build_matrix.rings FILE ...` takes what `pytest --cpu-seconds` wrote into tests/durations.json."""

import sys
from pathlib import Path

from build_matrix.check import rings

if __name__ == "__main__":
    rings.take(map(Path, sys.argv[1:]))
