"""What each rank of test_pipeline_failures_gpus.py runs."""

from __future__ import annotations

import pp_failures
import pp_gpus
import pp_messages

CASES = {**pp_messages.CASES, **pp_failures.CASES}


def run(rank, ranks, folder):
    pp_gpus.run(rank, ranks, folder, __name__)
