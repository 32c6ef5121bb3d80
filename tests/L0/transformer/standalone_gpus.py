"""What each rank of test_standalone_gpus.py runs: the cases of standalone models on GPUs, with NCCL."""

from __future__ import annotations

import sharded_adam
import standalone_ranks
import torch

CASES = standalone_ranks.CASES


def run(rank, ranks, folder):
    """One rank, on its GPU."""
    sharded_adam.start_nccl(rank, ranks, folder, device_id=torch.device("cuda", rank))
    sharded_adam.run_cases(__name__, None, rank, folder)
