"""What the cases of the ddp_*.py files share: a network, batches, and what is asserted over all ranks."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import nn

BATCH = 4  # rows a rank


def network(seed=0, dtype=torch.float32):
    """(N, 5) -> (N, 2): six parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 2)).to(dtype)


def rows(step=0, width=5):
    """The batch of all ranks together, the same on each."""
    count = BATCH * dist.get_world_size()
    return torch.randn(count, width, generator=torch.Generator().manual_seed(100 + step))


def mine(whole):
    first = BATCH * dist.get_rank()
    return whole[first : first + BATCH]


def loss_of(output):
    return output.float().square().mean()


def grads(module):
    return [p.grad for p in module.parameters()]


def gathered(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def same_on_all_ranks(tensors):
    for others in gathered([None if t is None else t.detach() for t in tensors]):
        for t, other in zip(tensors, others, strict=True):
            assert (t is None) == (other is None)
            assert t is None or torch.equal(t.cpu(), other.cpu())


def close(found, wanted, tolerance=1e-6):
    for f, w in zip(found, wanted, strict=True):
        torch.testing.assert_close(f, w, rtol=tolerance, atol=tolerance)


@contextlib.contextmanager
def collectives():
    """The all-reduces of a backward pass: [(elements, dtype, group)], flags of presence left out."""
    calls, all_reduce = [], dist.all_reduce

    def note(tensor, *args, group=None, **kwargs):
        calls.append((tensor.numel(), tensor.dtype, group))
        return all_reduce(tensor, *args, group=group, **kwargs)

    dist.all_reduce = note
    try:
        yield calls
    finally:
        dist.all_reduce = all_reduce


def messages(ddp, step=0):
    """The all-reduces of one backward pass."""
    ddp.zero_grad()
    with collectives() as calls:
        loss_of(ddp(mine(rows(step)))).backward()
    return calls


@contextlib.contextmanager
def raises(kind, *words):
    try:
        yield
    except kind as error:
        for word in words:
            assert word in str(error), str(error)
    else:
        raise AssertionError(f"no {kind.__name__}")


class Probe(nn.Module):
    """Calls a function when the backward pass comes by."""

    def __init__(self, call=None):
        super().__init__()
        self.call = call

    def forward(self, x):
        if x.requires_grad:
            x.register_hook(lambda grad: self.call())
        return x
