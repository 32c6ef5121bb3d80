"""apex.transformer.pipeline_parallel over ranks, on gloo: two and four processes; all splits of up to eight later."""

from __future__ import annotations

import pp_ranks
import pp_table
import pytest
import sharded_adam
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")


@pytest.fixture(scope="module", params=[(4, "cpu"), (2, "reference")], ids=["4-cpu", "2-reference"])
def results(request, tmp_path_factory):
    """How each case ended, by rank."""
    ranks, variant = request.param
    return sharded_adam.results_of(ranks, variant, tmp_path_factory.mktemp(variant), "pp_ranks")


@pytest.mark.parametrize("case", pp_ranks.CASES)
def test_ranks(results, case):
    for rank, result in enumerate(results):
        assert not result[case], f"rank {rank}: {result[case]}"


@pytest.mark.minutes
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_split(ranks, tmp_path):
    """Tensor 1, 2, 4 x pipeline 1, 2, 4 x virtual 1, 2 x data 1, 2 with all options, in one spawn a world size."""
    for rank, result in enumerate(sharded_adam.results_of(ranks, "reference", tmp_path, "pp_table")):
        for case in pp_table.CASES:
            assert not result[case], f"rank {rank}: {result[case]}"
