"""What each rank of test_pipeline_parallel_ranks.py runs, on gloo. A case takes the mesh, and raises on failure."""

from __future__ import annotations

import pp_failures
import pp_kinds
import pp_messages
import pp_splits
import pp_syncs

CASES = {
    **pp_splits.CASES,
    **pp_messages.CASES,
    **pp_kinds.CASES,
    **pp_syncs.CASES,
    **pp_failures.CASES,
}
