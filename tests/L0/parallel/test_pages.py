"""What the pages on parallel training show runs as it stands there, on two ranks."""

from __future__ import annotations

import json

import page_ranks
import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """How each case ended, by rank."""
    folder = tmp_path_factory.mktemp("pages")
    torch.multiprocessing.spawn(page_ranks.run_rank, (2, str(folder)), nprocs=2)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", page_ranks.CASES)
def test_ranks(results, case):
    for rank, result in enumerate(results):
        assert not result[case], f"rank {rank}: {result[case]}"
