"""SyncBatchNorm over ranks: two and four processes, gloo, CPU."""

from __future__ import annotations

import pytest
import sharded_adam
import sync_batchnorm_ranks
import torch

from apex.parallel import create_syncbn_process_group

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")


@pytest.fixture(scope="module", params=["2-cpu", "2-reference", "4-cpu"])
def results(request, tmp_path_factory):
    """How each case ended, by rank."""
    ranks, variant = request.param.split("-")
    folder = tmp_path_factory.mktemp(request.param)
    return sharded_adam.results_of(int(ranks), variant, folder, "sync_batchnorm_ranks")


@pytest.mark.parametrize("case", sync_batchnorm_ranks.CASES)
def test_ranks(results, case):
    for rank, result in enumerate(results):
        assert not result[case], f"rank {rank}: {result[case]}"


def test_no_process_group():
    assert create_syncbn_process_group(0) is None
    with pytest.raises(RuntimeError, match="init_process_group first"):
        create_syncbn_process_group(2)
