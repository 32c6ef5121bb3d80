"""Makes the packages beside this folder importable, as tests/simt/conftest.py does."""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))


def pytest_configure(config):
    config.addinivalue_line("markers", "emulated: runs AMD machine code on the emulator")
