"""Cases of test_distributed.py: Reducer, and collectives over lists of tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist
from ddp_common import (
    close,
    collectives,
    grads,
    loss_of,
    mine,
    network,
    rows,
    same_on_all_ranks,
)
from ddp_models import Branches

from apex.parallel import Reducer, distributed


def _reducer(mesh):
    module, whole = network(seed=dist.get_rank()), network()
    reducer = Reducer(module)
    close(module.parameters(), whole.parameters(), 0)
    for step in range(2):  # gradients accumulate until it is told
        loss_of(module(mine(rows(step)))).backward()
        loss_of(whole(rows(step))).backward()
    reducer.reduce()
    close(grads(module), grads(whole))

    module = Branches()
    reducer = Reducer(module)
    loss_of(module(mine(rows()), 0, *([1] if dist.get_rank() == 1 else []))).backward()
    reducer.reduce()
    same_on_all_ranks(grads(module))
    assert [g is None for g in grads(module)] == [False] * 4 + [True] * 2

    tensors = [torch.full((2,), float(dist.get_rank())), [torch.full((3,), dist.get_rank() * 2.0).double()]]
    Reducer(tensors).reduce()
    mean = (dist.get_world_size() - 1) / 2
    assert (tensors[0] == mean).all() and (tensors[1][0] == 2 * mean).all()


def _flat_calls(mesh):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full(shape, float(rank)) for shape in ((2, 3), (), (0, 4))]
    tensors += [torch.full((4, 2), float(rank)).t().double(), torch.full((5,), rank)]
    strides = [t.stride() for t in tensors]
    with collectives() as calls:
        distributed.flat_dist_call(tensors[:4], dist.all_reduce)
    assert [n for n, *_ in calls] == [7, 8]
    assert all((t == (ranks - 1) / 2).all() for t in tensors[:4])
    for t in tensors:
        t.fill_(rank)
    distributed.flat_dist_call(tensors, dist.broadcast, (1,))
    assert all((t == 1).all() for t in tensors) and [t.stride() for t in tensors] == strides
    same = [torch.full((3,), float(rank))]
    distributed.apply_flat_dist_call(same, dist.all_reduce, (dist.ReduceOp.MAX,))
    assert (same[0] == (ranks - 1) / ranks).all()  # as in public apex: every all_reduce is divided


CASES = {
    "reducer": _reducer,
    "flat_calls": _flat_calls,
}
