"""ASP on two ranks: they share the search for orders of channels. gloo, CPU."""

from __future__ import annotations

import asp_ranks
import pytest
import sharded_adam
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """How each case ended, by rank."""
    return sharded_adam.results_of(2, "reference", tmp_path_factory.mktemp("ranks"), "asp_ranks")


@pytest.mark.parametrize("case", asp_ranks.CASES)
def test_ranks(results, case):
    for rank, result in enumerate(results):
        assert not result[case], f"rank {rank}: {result[case]}"
