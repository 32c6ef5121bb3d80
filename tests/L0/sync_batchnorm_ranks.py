"""What each rank of test_sync_batchnorm_ranks.py runs, on gloo."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

from apex.parallel import create_syncbn_process_group


def _group(mesh, size):
    """Neighbours share a group, and nobody else does."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group = create_syncbn_process_group(size)
    assert dist.get_world_size(group) == size
    found = torch.tensor(float(rank))
    dist.all_reduce(found, group=group)
    first = rank // size * size
    assert found.item() == sum(range(first, first + size)) and first + size <= world


def _all_ranks(mesh):
    assert create_syncbn_process_group(0) is None


def _indivisible(mesh):
    for size in (3, -1, dist.get_world_size() + 1):
        with pytest.raises(ValueError, match="must divide the world size"):
            create_syncbn_process_group(size)


CASES = {
    "group_of_1": functools.partial(_group, size=1),
    "group_of_2": functools.partial(_group, size=2),
    "all_ranks": _all_ranks,
    "indivisible": _indivisible,
}
