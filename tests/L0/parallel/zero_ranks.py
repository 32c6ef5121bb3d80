"""What each rank of test_distributed_fused_adam.py runs, on gloo."""

from __future__ import annotations

import zero_checkpoints
import zero_faults
import zero_states
import zero_steps

CASES = {**zero_steps.CASES, **zero_states.CASES, **zero_checkpoints.CASES, **zero_faults.CASES}
