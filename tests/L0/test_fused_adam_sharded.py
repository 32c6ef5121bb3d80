"""FusedAdam over FSDP2's sharded parameters: two processes, gloo, CPU."""

from __future__ import annotations

import pytest
import sharded_adam
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")
RANKS = 2


@pytest.fixture(scope="module", params=["reference", "cpu"])
def results(request, tmp_path_factory):
    """How each case ended, by rank."""
    return sharded_adam.results_of(RANKS, request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("case", sharded_adam.CASES)
def test_two_ranks(results, case):
    for rank, result in enumerate(results):
        assert not result[case], f"rank {rank}: {result[case]}"
