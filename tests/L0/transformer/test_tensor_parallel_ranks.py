"""apex.transformer over ranks: two and four processes on gloo."""

from __future__ import annotations

import json

import pytest
import sharded_adam
import torch
import torch.multiprocessing
import tp_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")


@pytest.fixture(scope="module", params=[(4, "cpu"), (2, "reference")], ids=["4-cpu", "2-reference"])
def results(request, tmp_path_factory):
    """How each case ended, by rank."""
    ranks, variant = request.param
    return sharded_adam.results_of(ranks, variant, tmp_path_factory.mktemp(variant), "tp_ranks")


@pytest.mark.parametrize("case", tp_ranks.CASES)
def test_ranks(results, case):
    for rank, result in enumerate(results):
        assert not result[case], f"rank {rank}: {result[case]}"


def test_a_rank_that_ends(tmp_path):
    """What waits for it says so: who, for what, and what may have happened."""
    torch.multiprocessing.spawn(tp_ranks.run_and_end, (str(tmp_path),), nprocs=2)
    told = json.loads((tmp_path / "told.json").read_text())
    for name, what in (
        ("forward", "a sum over the tensor parallel ranks"),
        ("backward", "the gradient of a layer's input"),
        ("loss", "a cross entropy over the tensor parallel ranks"),
        ("batch", "a batch for the tensor parallel ranks"),
    ):
        assert f"rank 0 waited in vain for the other ranks' part of {what}: a rank ended" in told[name]
