"""apex.transformer.pipeline_parallel over ranks, on gloo: two and four processes; all splits of up to eight later."""

from __future__ import annotations

import json
import re

import pp_ends
import pp_ranks
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


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the ranks said that waited for another one."""
    folder = tmp_path_factory.mktemp("ends")
    torch.multiprocessing.spawn(pp_ends.run, (str(folder),), nprocs=4)
    return [json.loads((folder / f"told{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("rank", [0, 1], ids=["ends", "is late"])
def test_a_rank_that(told, rank):
    """What waits for it says so: who, for what, from whom, and what may have happened."""
    assert f"rank {rank} waited in vain for" in told[rank]
    # A process that ends may take the message before along.
    assert re.search(f"the gradients of microbatch [12] that stage 1 sends from rank {rank + 2}", told[rank])
    assert "that rank ended, failed, or is in another part of the schedule" in told[rank]


@pytest.mark.minutes
@pytest.mark.parametrize("ranks, module", [*((n, "pp_table") for n in (1, 2, 4, 8)), (16, "pp_sample")])
def test_every_split(ranks, module, tmp_path):
    """Tensor 1, 2, 4 x pipeline 1, 2, 4 x virtual 1, 2 x data 1, 2 with all options, in one spawn a world size; of 16
    ranks each split once."""
    for rank, result in enumerate(sharded_adam.results_of(ranks, "reference", tmp_path, module)):
        for case, told in result.items():
            assert not told, f"{case}, rank {rank}: {told}"
