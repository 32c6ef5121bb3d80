"""apex.transformer_engine over ranks: two processes on gloo."""

from __future__ import annotations

import pytest
import sharded_adam
import te_ranks
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """How each case ended, by rank."""
    return sharded_adam.results_of(2, "cpu", tmp_path_factory.mktemp("cpu"), "te_ranks")


@pytest.mark.parametrize("case", te_ranks.CASES)
def test_ranks(results, case):
    for rank, result in enumerate(results):
        assert not result[case], f"rank {rank}: {result[case]}"
