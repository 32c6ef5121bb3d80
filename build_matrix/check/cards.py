"""Whether a cell's card, or the emulator, can be on this machine: asked before anything is installed, so of the
standard library alone. What is there exactly, torch says later."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from build_matrix import REPOSITORY
from build_matrix.spec import matrix

# dxg: Windows' subsystem for Linux.
DEVICES = {"cuda": ("dev/nvidiactl", "dev/dxg"), "rocm": ("dev/kfd", "dev/dxg")}


def why_none(tier: str, cell: str, root: Path = Path("/")) -> str:
    """Why nothing of this tier can run in this cell here; "" where it may. Raises BuildError where no such cell is."""
    if tier == "emulated":
        return _emulator().why_not()
    if cell == "cpu":
        return ""
    vendor = matrix.load().pack(cell).arch.vendor
    nodes = [root / name for name in DEVICES[vendor]]
    if any(node.exists() for node in nodes):
        return ""
    maker = {"cuda": "NVIDIA", "rocm": "AMD"}[vendor]
    return f"no {maker} GPU is here: there is no {' or '.join(str(node) for node in nodes)}"


def _emulator():
    """tests/emulated/toolchain.py, which knows what the emulator needs."""
    path = REPOSITORY / "tests/emulated/toolchain.py"
    spec = importlib.util.spec_from_file_location("emulated_toolchain", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
