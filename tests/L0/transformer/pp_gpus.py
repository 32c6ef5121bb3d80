"""What each rank of test_pipeline_parallel_gpus.py and test_pipeline_failures_gpus.py runs, on GPUs with NCCL: cases of
pipelines, in two parts that can run beside each other."""

from __future__ import annotations

import pp_splits
import pp_syncs
import sharded_adam

CASES = {**pp_splits.CASES, **pp_syncs.CASES}


def run(rank, ranks, folder, module=__name__):
    """One rank, on its GPU. NCCL connects a group when it is first used: most of the many here never are."""
    sharded_adam.start_nccl(rank, ranks, folder)
    sharded_adam.run_cases(module, None, rank, folder)
