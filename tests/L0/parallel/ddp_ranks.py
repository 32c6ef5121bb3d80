"""What each rank of test_distributed.py runs, on gloo. A case takes the device mesh, and raises if it fails."""

from __future__ import annotations

import ddp_amp
import ddp_faults
import ddp_models
import ddp_options
import ddp_passes
import ddp_reducer

CASES = {
    **ddp_options.CASES,
    **ddp_models.CASES,
    **ddp_passes.CASES,
    **ddp_amp.CASES,
    **ddp_reducer.CASES,
    **ddp_faults.CASES,
}
