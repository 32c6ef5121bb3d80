"""What each of four ranks of test_distributed_fused_lamb.py runs: cases in which they make a grid, and a few others."""

from __future__ import annotations

import zero_lamb

NAMES = (
    "grid",
    "grid_full_ar",
    "copies",
    "several_groups",
    "clips_before",
    "overflow",
    "accumulates",
    "idle",
    "unequal",
    "resumes",
)
CASES = {name: zero_lamb.CASES[name] for name in NAMES}
