"""Standalone GPT and BERT over ranks: two processes on gloo, and four in the long ring."""

from __future__ import annotations

import pytest
import sharded_adam
import standalone_ranks
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")
RANKS = [pytest.param(2, id="2"), pytest.param(4, marks=pytest.mark.minutes, id="4")]


@pytest.fixture(scope="module", params=RANKS)
def results(request, tmp_path_factory):
    """How each case ended, by rank."""
    folder = tmp_path_factory.mktemp("standalone")
    return sharded_adam.results_of(request.param, "cpu", folder, "standalone_ranks")


@pytest.mark.parametrize("case", standalone_ranks.CASES)
def test_ranks(results, case):
    for rank, result in enumerate(results):
        assert not result[case], f"rank {rank}: {result[case]}"
