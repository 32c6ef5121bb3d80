"""Batch norm over groups of ranks: two processes in one group, four in two; gloo, CPU."""

from __future__ import annotations

import groupbn_ranks
import pytest
import sharded_adam
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")


@pytest.fixture(scope="module", params=["2-cpu", "2-reference", "4-cpu"])
def results(request, tmp_path_factory):
    """How each case ended, by rank."""
    ranks, variant = request.param.split("-")
    folder = tmp_path_factory.mktemp(request.param)
    return sharded_adam.results_of(int(ranks), variant, folder, "groupbn_ranks")


@pytest.mark.parametrize("case", groupbn_ranks.CASES)
def test_ranks(results, case):
    for rank, result in enumerate(results):
        assert not result[case], f"rank {rank}: {result[case]}"
