"""Cases of test_distributed.py: parameters of all sorts, and the wrapper as a module."""

from __future__ import annotations

import copy
import gc
import io
import pickle

import torch
import torch.distributed as dist
from ddp_common import (
    BATCH,
    close,
    collectives,
    gathered,
    grads,
    loss_of,
    messages,
    mine,
    network,
    rows,
    same_on_all_ranks,
)
from torch import nn

from apex.parallel import DistributedDataParallel as DDP


class Mixed(nn.Module):
    """One layer for each dtype, with what is empty, a scalar, not contiguous, shared, complex and frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
        self.layers = nn.ModuleList(nn.Linear(5, 5).to(dtype) for dtype in dtypes)
        self.again = self.layers[0]
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.complex = nn.Parameter(torch.tensor([1.0 + 2.0j]))
        self.conv = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("offset", torch.zeros(1))

    def forward(self, x):
        total = (self.scalar * x).sum() + self.empty.sum() + (self.complex * x.sum()).abs().sum()
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        image = self.again(x.float()).unsqueeze(1).unsqueeze(1).expand(-1, 1, 5, 5)
        total = total + self.conv(image.contiguous(memory_format=torch.channels_last)).sum()
        return total * self.frozen.sum()


def _all_sorts(mesh):
    for options in ({}, {"delay_allreduce": True}, {"message_size": 1}, {"allreduce_always_fp32": True}):
        module = Mixed()
        alone = [copy.deepcopy(module) for _ in range(dist.get_world_size())]
        ddp = DDP(module, **options)
        for step in range(2):
            ddp.zero_grad()
            with collectives() as calls:
                ddp(mine(rows(step))).backward()
            assert {torch.float64, torch.float32, torch.complex64} <= {dtype for _, dtype, _ in calls}
            same_on_all_ranks(grads(module))
            for rank, other in enumerate(alone):
                other.zero_grad()
                other(rows(step)[BATCH * rank : BATCH * (rank + 1)]).backward()
            for (name, p), *others in zip(
                module.named_parameters(), *(m.parameters() for m in alone), strict=True
            ):
                if name == "frozen":
                    assert p.grad is None
                    continue
                mean = torch.stack([q.grad.to(torch.promote_types(q.dtype, torch.float32)) for q in others])
                assert p.grad.stride() == others[0].grad.stride()
                tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(p.dtype, 1e-5)
                torch.testing.assert_close(
                    p.grad.to(mean.dtype),
                    mean.mean(0),
                    rtol=tolerance,
                    atol=tolerance,
                    msg=name,
                )


class Branches(nn.Module):
    """Three layers, of which a pass uses those that it names, in that order."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x, *used):
        for i in used:
            x = self.layers[i](x)
        return x


def _unused(mesh):
    """What a rank does not use counts as 0 there; what nobody uses keeps None, and what it held."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for options in ({}, {"delay_allreduce": True}, {"message_size": 1}, {"retain_allreduce_buffers": True}):
        ddp = DDP(Branches(), **options)
        for used in (
            lambda r: (0,),  # the same one everywhere
            lambda r: (0, 1),  # one that was not there when the buckets were made
            lambda r: (0, 1) if r else (0,),  # ranks differ
            lambda r: (0,) if r else (0, 1),
            lambda r: (1, 0) if r else (0, 1),  # in another order
            lambda r: (r % 2,),
        ):
            ddp.zero_grad()
            loss_of(ddp(mine(rows()), *used(rank))).backward()
            same_on_all_ranks(grads(ddp))
            wanted = [torch.zeros_like(p) for p in ddp.parameters()]
            known = [False] * len(wanted)
            for other in range(ranks):
                alone = Branches()
                loss_of(alone(rows()[BATCH * other : BATCH * (other + 1)], *used(other))).backward()
                for i, grad in enumerate(grads(alone)):
                    if grad is not None:
                        wanted[i] += grad / ranks
                        known[i] = True
            for p, grad, used_somewhere in zip(ddp.parameters(), wanted, known, strict=True):
                assert (p.grad is not None) == used_somewhere
                if used_somewhere:
                    close([p.grad], [grad])


def _order_of_rank_0(mesh):
    """Ranks whose gradients come in different orders make the same buckets."""
    ddp = DDP(Branches(), message_size=1)
    order = (2, 1, 0) if dist.get_rank() else (0, 1, 2)
    for _ in range(3):
        ddp.zero_grad()
        loss_of(ddp(mine(rows()), *order)).backward()
        same_on_all_ranks(grads(ddp))
    index = {id(p): i for i, p in enumerate(ddp.parameters())}
    found = gathered([[index[id(p)] for p in bucket.params] for bucket in ddp._live.buckets])
    assert all(buckets == found[0] for buckets in found)
    assert {i for bucket in found[0][:2] for i in bucket} == {4, 5}  # rank 0's last layer


def _refresh(mesh):
    """Parameters that come to require gradients, or no longer do, make the buckets anew."""
    module, whole = network(), network()
    ddp = DDP(module, 20)
    assert ddp.needs_refresh
    for step in range(4):
        for model in (module, whole):
            model[2].requires_grad_(step >= 2)
            model.zero_grad()
        loss_of(ddp(mine(rows(step)))).backward()
        assert not ddp.needs_refresh
        loss_of(whole(rows(step))).backward()
        for p, q in zip(module.parameters(), whole.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None) == (not p.requires_grad)
            if p.requires_grad:
                close([p.grad], [q.grad])
    assert len(ddp.active_params) == 6


def _state_dict(mesh):
    module = network(seed=3)
    ddp = DDP(module)
    messages(ddp)
    assert list(ddp.state_dict()) == ["module." + name for name in module.state_dict()]
    other = DDP(network(seed=4))
    other.load_state_dict(ddp.state_dict())
    close(other.parameters(), module.parameters(), 0)
    messages(other, 1)
    same_on_all_ranks(grads(other))


def _copies(mesh):
    ddp = DDP(network(), 20, num_allreduce_streams=2, allreduce_trigger_params=None)
    messages(ddp)
    pickled = io.BytesIO()
    torch.save(ddp, pickled)
    pickled.seek(0)
    for other in (
        copy.deepcopy(ddp),
        pickle.loads(pickle.dumps(ddp)),
        torch.load(pickled, weights_only=False),
    ):
        assert other.message_size == 20 and other.needs_refresh
        whole = network()
        for step in range(2):
            ddp.zero_grad()
            assert messages(other, step)
            whole.zero_grad()
            loss_of(whole(rows(step))).backward()
            close(grads(other.module), grads(whole))
            assert grads(ddp) == [None] * 6
    triggered = DDP(module := network(), 1, allreduce_trigger_params=[module[2].weight])
    again = copy.deepcopy(triggered)
    messages(again)
    assert len(messages(again)) == 2


def _given_up(mesh):
    """A module whose wrapper is gone is on its own."""
    module = network()
    ddp = DDP(module)
    messages(ddp)
    module.zero_grad()
    del ddp
    gc.collect()
    with collectives() as calls:
        loss_of(module(mine(rows()))).backward()
    assert not calls and module[0].weight.grad is not None


def _compiled(mesh):
    whole = network()
    for wrap in (
        lambda m: DDP(torch.compile(m, backend="aot_eager"), 20),
        lambda m: torch.compile(DDP(m, 20), backend="aot_eager"),
    ):
        torch._dynamo.reset()
        module = network()
        model = wrap(module)
        for step in range(3):
            module.zero_grad()
            whole.zero_grad()
            loss_of(model(mine(rows(step)))).backward()
            loss_of(whole(rows(step))).backward()
            close(grads(module), grads(whole))


CASES = {
    "all_sorts": _all_sorts,
    "unused": _unused,
    "order_of_rank_0": _order_of_rank_0,
    "refresh": _refresh,
    "state_dict": _state_dict,
    "copies": _copies,
    "given_up": _given_up,
    "compiled": _compiled,
}
