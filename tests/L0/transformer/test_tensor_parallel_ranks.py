"""apex.transformer over ranks: two and four processes on gloo."""

from __future__ import annotations

import pytest
import sharded_adam
import torch
import tp_ranks


@pytest.fixture(scope="module", params=[(4, "cpu"), (2, "reference")], ids=["4-cpu", "2-reference"])
def results(request, tmp_path_factory):
    """How each case ended, by rank."""
    ranks, variant = request.param
    return sharded_adam.results_of(ranks, variant, tmp_path_factory.mktemp(variant), "tp_ranks")


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")
@pytest.mark.parametrize("case", tp_ranks.CASES)
def test_ranks(results, case):
    for rank, result in enumerate(results):
        assert not result[case], f"rank {rank}: {result[case]}"
