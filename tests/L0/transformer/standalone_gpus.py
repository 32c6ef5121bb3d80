"""What each rank of test_standalone_gpus.py runs: the cases of standalone models on GPUs, with NCCL."""

from __future__ import annotations

import sharded_adam
import standalone_ranks

CASES = standalone_ranks.CASES


def run(rank, ranks, folder):
    """One rank, on its GPU. NCCL connects a group when it is first used: most of the many here never are."""
    sharded_adam.start_nccl(rank, ranks, folder)
    sharded_adam.run_cases(__name__, None, rank, folder)
