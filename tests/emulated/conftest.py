"""Makes the packages beside this folder importable, as tests/simt/conftest.py does."""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
