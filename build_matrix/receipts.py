"""Receipts: what a test run saw on a card. One JSON file a run in build_matrix/receipts/:

{"tier": "L0", "card": "NVIDIA H100", "arch": "sm_90", "driver": "580.65", "torch": "2.13.0+cu130", "apex":
"1.10.0",
 "code_objects": {"multi_tensor_adam": "<sha256>"}, "passed": 812, "failed": 0, "skipped": 3}
"""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).with_name("receipts")
LOADS = FOLDER / "loads"  # bindings that were loaded under a slim torch (slim_torch.py)


def load(folder: Path = FOLDER) -> list[dict]:
    """Every receipt, by file name."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def grade(arch: str, torch: str, emulated: bool, receipts: list[dict]) -> str:
    """The best that is known of an arch with a torch minor: `L1 on NVIDIA H100`, `emulated`, or `built`.

    A run that failed a test, or ran none, is no receipt of anything.
    """
    good = [
        r for r in receipts
        if r["arch"] == arch and r["torch"].startswith(f"{torch}.") and r["passed"] and not r["failed"]
    ]  # fmt: skip
    if good:
        best = max(good, key=lambda receipt: receipt["tier"])
        return f"{best['tier']} on {best['card']}"
    return "emulated" if emulated else "built"


def load_grade(torch: str, python: str, bindings: str, folder: Path = LOADS) -> str | None:
    """What is known of a binding whose sources have the digest `bindings`; None when nothing is."""
    try:
        receipt = json.loads((folder / f"torch-{torch}-{python}.json").read_text())
    except FileNotFoundError:
        return None
    return receipt["grade"] if receipt["bindings"] == bindings else None
