"""What each rank of test_pipeline_parallel_gpus.py runs: the cases of pipelines on GPUs, with NCCL."""

from __future__ import annotations

import pp_failures
import pp_messages
import pp_splits
import pp_syncs
import sharded_adam

CASES = {
    **pp_splits.CASES,
    **pp_messages.CASES,
    **pp_syncs.CASES,
    **pp_failures.CASES,
}


def run(rank, ranks, folder):
    """One rank, on its GPU. NCCL connects a group when it is first used: most of the many here never are."""
    sharded_adam.start_nccl(rank, ranks, folder)
    sharded_adam.run_cases(__name__, None, rank, folder)
