"""What each rank of test_standalone_bert_gpus.py runs: the part of standalone_gpus.py's cases that is called BERT."""

from __future__ import annotations

import standalone_gpus
import standalone_ranks

CASES = {name: standalone_ranks.CASES[name] for name in standalone_gpus.BERT}


def run(rank, ranks, folder):
    standalone_gpus.run(rank, ranks, folder, __name__)
