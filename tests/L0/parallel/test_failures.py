"""One rank fails, and the others do not wait until the timeout: two and four ranks on gloo."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import failure_ranks
import pytest
import sharded_adam
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")


@pytest.fixture(scope="module", params=[2, 4])
def results(request, tmp_path_factory):
    """How each case ended, by rank."""
    folder = tmp_path_factory.mktemp("failures")
    return sharded_adam.results_of(request.param, "reference", folder, "failure_ranks")


@pytest.mark.parametrize("case", failure_ranks.CASES)
def test_ranks(results, case):
    for rank, result in enumerate(results):
        assert not result[case], f"rank {rank}: {result[case]}"


PROGRAM = """
    import datetime, sys, threading, time, torch
    import torch.distributed as dist
    from apex.transformer import _collectives, parallel_state

    rank = int(sys.argv[1])
    dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2,
                            timeout=datetime.timedelta(seconds=120))
    parallel_state.initialize_model_parallel(2)
    group = parallel_state.get_tensor_model_parallel_group()
    _collectives.all_reduce(torch.ones(1), group, "a start")
    if rank == 1:
        threading.Thread(target=time.sleep, args=(60,)).start()  # which keeps the process
        raise KeyError("of a program")
    _collectives.all_reduce(torch.ones(1), group, "a sum")
"""


def test_an_error_that_ends_a_process(tmp_path):
    """It is told although nothing was asked for, and before the process has ended."""
    run = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    start = time.monotonic()
    ranks = [
        subprocess.Popen([*run, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    try:
        told = ranks[0].communicate(timeout=50)[1]
        assert time.monotonic() - start < 50
        assert ranks[1].poll() is None
        assert ranks[0].returncode == 1
        assert "rank 0 waited in vain for the other ranks' part of a sum: rank 1 failed in " in told
        assert "KeyError: 'of a program'" in told
    finally:
        for rank in ranks:
            rank.kill()
    assert "KeyError: 'of a program'" in ranks[1].communicate()[1]  # and still printed there
