"""SyncBatchNorm over ranks: two and four processes, gloo, CPU."""

from __future__ import annotations

import json

import pytest
import sharded_adam
import sync_batchnorm_ranks
import torch
import torch.multiprocessing

from apex.parallel import create_syncbn_process_group

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def results(request, tmp_path_factory):
    """How each case ended, by rank."""
    ranks = request.param
    folder = tmp_path_factory.mktemp(f"{ranks}_ranks")
    arguments = (ranks, str(folder), {"APEX_VARIANT": "cpu"}, "sync_batchnorm_ranks")
    torch.multiprocessing.spawn(sharded_adam.run, arguments, nprocs=ranks)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("case", sync_batchnorm_ranks.CASES)
def test_ranks(results, case):
    for rank, result in enumerate(results):
        assert not result[case], f"rank {rank}: {result[case]}"


def test_no_process_group():
    assert create_syncbn_process_group(0) is None
    with pytest.raises(RuntimeError, match="init_process_group first"):
        create_syncbn_process_group(2)
