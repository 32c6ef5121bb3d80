"""What each rank of test_standalone_gpus.py runs: the cases of standalone models on GPUs, with NCCL."""

from __future__ import annotations

import sharded_adam
import standalone_ranks

CASES = standalone_ranks.CASES
del standalone_ranks.BOUNDS[
    "--fp16"
]  # of any split: the ranks on gloo have it, and groups of NCCL take their time


def run(rank, ranks, folder):
    """One rank, on its GPU. NCCL connects a group when it is first used: most of the many here never are."""
    sharded_adam.start_nccl(rank, ranks, folder)
    sharded_adam.run_cases(__name__, None, rank, folder)
