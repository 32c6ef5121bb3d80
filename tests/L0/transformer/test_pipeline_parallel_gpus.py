"""apex.transformer.pipeline_parallel over two GPUs with NCCL: splits of models, and what is waited for."""

from __future__ import annotations

import pp_gpus
import pytest
import sharded_adam
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """How each case ended, by rank."""
    return sharded_adam.results_on_gpus(pp_gpus.run, tmp_path_factory.mktemp("nccl"))


@pytest.mark.two_gpus
@pytest.mark.parametrize("case", pp_gpus.CASES)
def test_nccl(results, case):
    for rank, result in enumerate(results):
        assert not result[case], f"rank {rank}: {result[case]}"
