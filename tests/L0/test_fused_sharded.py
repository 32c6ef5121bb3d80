"""FusedSGD, FusedAdagrad, FusedLAMB, FusedLARS, FusedNovoGrad over FSDP2's shards: two processes, gloo, CPU."""

from __future__ import annotations

import json

import pytest
import sharded
import sharded_adam
import torch
import torch.multiprocessing

from apex._loader import bindings

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")
RANKS = 2


@pytest.fixture(scope="module", params=["reference", "cpu"])
def results(request, tmp_path_factory):
    """How each case ended, by rank."""
    if request.param == "cpu" and not bindings.load().native:
        pytest.skip(f"no bindings: {bindings.load().reason}")
    folder = tmp_path_factory.mktemp(request.param)
    arguments = (RANKS, str(folder), {"APEX_VARIANT": request.param}, "sharded")
    torch.multiprocessing.spawn(sharded_adam.run, arguments, nprocs=RANKS)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("case", sharded.CASES)
def test_two_ranks(results, case):
    for rank, result in enumerate(results):
        assert not result[case], f"rank {rank}: {result[case]}"
