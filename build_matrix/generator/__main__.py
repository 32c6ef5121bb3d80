"""`python -m build_matrix.generator FOLDER` writes what is generated there, to be read."""

from __future__ import annotations

import sys
from pathlib import Path

from build_matrix.parts import bindings


def main(folder: Path) -> None:
    """Writes every generated file under `folder`, and prints its name."""
    for name, text in {**bindings.generated(False), **bindings.generated(True)}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
        print(folder / name)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
