"""combine_ddp: the plan of slices, and two and four processes on gloo."""

from __future__ import annotations

import json

import combined_ranks
import pytest
import torch
import torch.multiprocessing

from apex.amp._combined.ddp import LEAST, plan_slices

BIG = LEAST // 2


def lengths(slots, count, dtype=torch.float32):
    return [sum(slots[first:last]) for first, last in plan_slices(slots, dtype, count)]


def test_slices_cover_every_tensor_once():
    slots = [48, 5 * LEAST, 64, BIG, BIG, BIG, 48, 3 * LEAST, 32]
    for count in (1, 4, 8, 1000):
        plan = plan_slices(slots, torch.float32, count)
        assert [i for first, last in plan for i in range(first, last)] == list(range(len(slots)))


@pytest.mark.parametrize("count, slices", [(1, 1), (4, 4), (8, 7)])
def test_the_wanted_number_is_a_target(count, slices):
    """Twenty tensors of half a mebi: no slice is closed before it is longer than ten mebi by the number."""
    assert len(lengths([BIG] * 20, count)) == slices


def test_bounds_of_a_slice():
    assert len(lengths([BIG] * 8, 1000)) == 3  # none closes before it is longer than 2^20
    assert max(lengths([BIG] * 200, 1)) == 24 * LEAST + BIG
    assert max(lengths([BIG] * 200, 1, torch.float16)) == 48 * LEAST + BIG


def test_a_long_tensor_is_a_slice_of_its_own():
    assert lengths([48, 48, 9 * LEAST, 48], 4) == [96, 9 * LEAST, 48]


@pytest.fixture(scope="module", params=[2, 4])
def results(request, tmp_path_factory):
    """How each case ended, by rank."""
    if not torch.distributed.is_available():
        pytest.skip("this torch has no distributed")
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(combined_ranks.run, (request.param, str(folder)), nprocs=request.param)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(request.param)]


@pytest.mark.parametrize("case", combined_ranks.CASES)
def test_ranks(results, case):
    for rank, result in enumerate(results):
        assert not result[case], f"rank {rank}: {result[case]}"
