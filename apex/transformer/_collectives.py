"""Collectives among the ranks of a group. A group of one rank says nothing; errors tell which rank waits for what."""

from __future__ import annotations

import torch
import torch.distributed as dist

from apex._plain import plain
from apex.parallel._waiting import waiting
from apex.parallel.process_groups import is_gloo

# Newer torch has these under other names, and warns about the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)

WHY = (
    "a rank ended, or did not make this call with a tensor of this shape, which every rank of the group makes"
)


class Pending:
    """A collective under way: `wait` gives its result; on an accelerator only the current stream waits."""

    def __init__(self, what, result, work=None, group=None):
        self._what, self._result, self._work, self._group = what, result, work, group

    def wait(self):
        if self._work is not None:
            with waiting(self._what, WHY, group=self._group) as wait:
                wait.until(self._work)
            self._work = None
        return self._result


def contiguous(tensor):
    """Its values, as collectives read them."""
    return plain(tensor).contiguous()


def copy(tensor):
    """Its values in memory of their own."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(tensor)


def start_all_reduce(tensor, group, what, op=None):
    """Sums (or `op`s) contiguous tensors of all ranks, in place."""
    if dist.get_world_size(group) == 1:
        return Pending(what, tensor)
    with waiting(what, WHY, group=group):
        work = dist.all_reduce(tensor, op=op or dist.ReduceOp.SUM, group=group, async_op=True)
    return Pending(what, tensor, work, group)


def all_reduce(tensor, group, what, op=None):
    return start_all_reduce(tensor, group, what, op).wait()


def start_all_gather(tensor, group, what):
    """The tensors of all ranks behind each other, along the first dimension."""
    ranks = dist.get_world_size(group)
    tensor = contiguous(tensor)
    if ranks == 1:
        return Pending(what, tensor)
    gathered = tensor.new_empty((ranks * tensor.shape[0], *tensor.shape[1:]))
    with waiting(what, WHY, group=group):
        if is_gloo(group, tensor.device):  # before torch 2.9 it has no all_gather_into_tensor
            work = dist.all_gather(list(gathered.chunk(ranks)), tensor, group=group, async_op=True)
        else:
            work = _all_gather(gathered, tensor, group=group, async_op=True)
    return Pending(what, gathered, work, group)


def all_gather(tensor, group, what):
    return start_all_gather(tensor, group, what).wait()


def start_reduce_scatter(tensor, group, what, overwrite=False):
    """This rank's part, along the first dimension, of the sum of all ranks' tensors.

    overwrite: the tensor is contiguous, and nobody looks at it any more.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return Pending(what, tensor)
    if is_gloo(
        group, tensor.device
    ):  # it has none for all dtypes in all versions, and would all-reduce anyway
        whole = start_all_reduce(tensor if overwrite else copy(tensor), group, what)
        return _Part(whole, tensor.shape[0] // ranks, dist.get_rank(group))
    tensor = contiguous(tensor)
    part = tensor.new_empty((tensor.shape[0] // ranks, *tensor.shape[1:]))
    with waiting(what, WHY, group=group):
        work = _reduce_scatter(part, tensor, group=group, async_op=True)
    return Pending(what, part, work, group)


class _Part:
    """The rows of one rank, of a collective under way."""

    def __init__(self, whole, rows, rank):
        self._whole, self._rows, self._rank = whole, rows, rank

    def wait(self):
        return self._whole.wait().narrow(0, self._rank * self._rows, self._rows).clone()


def broadcast(tensor, source, group, what):
    """Writes the contiguous tensor of the global rank `source` into all others'."""
    if dist.get_world_size(group) > 1:
        with waiting(what, WHY, group=group) as wait:
            wait.run(dist.broadcast, tensor, source, group=group)
    return tensor
