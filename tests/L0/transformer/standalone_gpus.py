"""What each rank of test_standalone_gpus.py and test_standalone_bert_gpus.py runs, on GPUs with NCCL: the cases of
standalone models, in two parts that can run beside each other."""

from __future__ import annotations

import sharded_adam
import standalone_pipelines
import standalone_ranks

# Not of any split: the ranks on gloo have it, and groups of NCCL take their time.
del standalone_ranks.BOUNDS["--fp16"]
BERT = ("BERT at any split", "stages", *standalone_pipelines.CASES)
CASES = {name: case for name, case in standalone_ranks.CASES.items() if name not in BERT}


def run(rank, ranks, folder, module=__name__):
    """One rank, on its GPU. NCCL connects a group when it is first used: most of the many here never are."""
    sharded_adam.start_nccl(rank, ranks, folder)
    sharded_adam.run_cases(module, None, rank, folder)
