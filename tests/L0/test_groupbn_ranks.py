"""Batch norm over groups of ranks: two processes in one group, four in two; gloo, CPU."""

from __future__ import annotations

import json

import groupbn_ranks
import pytest
import sharded_adam
import torch
import torch.multiprocessing

from apex._loader import bindings

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")


@pytest.fixture(scope="module", params=["2-cpu", "2-reference", "4-cpu"])
def results(request, tmp_path_factory):
    """How each case ended, by rank."""
    ranks, variant = int(request.param[0]), request.param[2:]
    if variant == "cpu" and not bindings.load().native:
        pytest.skip(f"no bindings: {bindings.load().reason}")
    folder = tmp_path_factory.mktemp(request.param)
    arguments = (ranks, str(folder), {"APEX_VARIANT": variant}, "groupbn_ranks")
    torch.multiprocessing.spawn(sharded_adam.run, arguments, nprocs=ranks)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("case", groupbn_ranks.CASES)
def test_ranks(results, case):
    for rank, result in enumerate(results):
        assert not result[case], f"rank {rank}: {result[case]}"
