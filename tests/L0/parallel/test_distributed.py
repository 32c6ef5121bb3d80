"""DistributedDataParallel and Reducer: two and four processes on gloo; two GPUs on NCCL."""

from __future__ import annotations

import json
import re

import ddp_nccl
import ddp_ranks
import pytest
import sharded_adam
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from apex.parallel import DistributedDataParallel, Reducer, _reduction
from apex.parallel._buckets import plan_buckets
from apex.parallel.distributed import split_half_float_double, split_half_float_double_bfloat16

distributed = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")


@pytest.fixture(scope="module", params=[(2, "cpu"), (4, "reference")], ids=["2-cpu", "4-reference"])
def results(request, tmp_path_factory):
    """How each case ended, by rank."""
    ranks, variant = request.param
    return sharded_adam.results_of(ranks, variant, tmp_path_factory.mktemp(variant), "ddp_ranks")


@distributed
@pytest.mark.parametrize("case", ddp_ranks.CASES)
def test_ranks(results, case):
    for rank, result in enumerate(results):
        assert not result[case], f"rank {rank}: {result[case]}"


@pytest.mark.parametrize("make", [DistributedDataParallel, Reducer])
def test_needs_a_process_group(make):
    with pytest.raises(RuntimeError, match="init_process_group"):
        make(nn.Linear(1, 1))


@pytest.mark.parametrize(
    "option, error",
    [
        (dict(message_size="10"), TypeError),
        (dict(num_allreduce_streams="2"), TypeError),
        (dict(num_allreduce_streams=2.0), TypeError),
        (dict(allreduce_communicators=[]), ValueError),
        (dict(allreduce_communicators=([None], [None])), ValueError),
        (dict(num_allreduce_streams=2, allreduce_communicators=([None], [None])), ValueError),
    ],
    ids=str,
)
def test_options_are_refused_when_it_is_made(option, error):
    """And not in the first backward pass."""
    with pytest.raises(error, match=[*option][-1]):
        DistributedDataParallel(nn.Linear(1, 1), **option)


def test_plan_of_buckets():
    sizes = (
        (4, torch.float32),
        (4, torch.float32),
        (4, torch.float16),
        (1, torch.float16),
        (9, torch.float32),
    )
    params = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n, dtype in sizes]
    a, b, c, d, e = params
    assert plan_buckets(params, [b, c, a, d], 8) == [[1, 0], [2, 3], [4]]
    assert plan_buckets(params, [b, c, a, d], 1) == [[1], [2], [0], [3], [4]]
    assert plan_buckets(params, [e, d, c, b, a], 100) == [[4, 1, 0], [3, 2]]
    assert plan_buckets(params, [e, d, c, b, a], 1, {id(b)}) == [[4, 1], [3, 2], [0]]
    assert plan_buckets(params, [], 1) == [[0, 1, 4], [2, 3]]


def test_tensors_split_by_type():
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.float16, torch.float32)
    a, b, c, _, d, e = tensors = [torch.zeros(2, dtype=dtype) for dtype in dtypes]
    for split, wanted in (
        (split_half_float_double, [[d], [a, e], [c]]),
        (split_half_float_double_bfloat16, [[d], [a, e], [c], [b]]),
    ):
        assert [[id(t) for t in group] for group in split(tensors)] == [[id(t) for t in g] for g in wanted]
        assert split([]) == []


@distributed
@pytest.mark.alone
@pytest.mark.two_gpus
def test_all_reduce_overlaps_backward(tmp_path):
    """In a trace of the third pass: NCCL's kernels run while the backward pass's do."""
    torch.multiprocessing.spawn(ddp_nccl.run, (2, str(tmp_path)), nprocs=2)
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        beside, delayed = found["beside"], found["delayed"]
        assert beside["messages"] >= 4 and beside["products"] >= 8, found
        assert beside["overlap_us"] > 0.3 * beside["all_reduce_us"], found
        assert delayed["overlap_us"] < 0.05 * delayed["all_reduce_us"], found


@distributed
@pytest.mark.parametrize(
    "error, waited",
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:545] Connection closed by peer [::1]:1"), True),
        (RuntimeError("Timed out waiting 60000ms for recv operation to complete"), True),
        (dist.DistBackendError("NCCL communicator was aborted"), True),
        (RuntimeError("No backend type associated with device type cpu"), False),
        (RuntimeError("Tensors must be contiguous"), False),
    ],
)
def test_which_errors_mean_that_a_rank_is_missing(error, waited):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        told = "rank 0 waited in vain" if waited else re.escape(str(error))
        with pytest.raises(RuntimeError, match=told), _reduction.waiting("a mean"):
            raise error
    finally:
        dist.destroy_process_group()
