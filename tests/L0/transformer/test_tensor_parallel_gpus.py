"""apex.transformer over two GPUs with NCCL, and on one, where nothing is said."""

from __future__ import annotations

import json

import pytest
import torch
import torch.multiprocessing
import tp_gpus

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """How each case ended, by rank."""
    folder = tmp_path_factory.mktemp("nccl")
    torch.multiprocessing.spawn(tp_gpus.run, (2, str(folder)), nprocs=2)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.two_gpus
@pytest.mark.parametrize("case", tp_gpus.CASES)
def test_nccl(results, case):
    for rank, result in enumerate(results):
        assert not result[case], f"rank {rank}: {result[case]}"
