"""Cases of test_distributed.py: ranks without work, or that raise; frozen and thawed parameters; strange gradients."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from ddp_common import (
    close,
    collectives,
    gathered,
    grads,
    loss_of,
    mine,
    network,
    raises,
    rows,
    same_on_all_ranks,
)
from sharded_adam import shorten
from torch import nn

from apex.parallel import DistributedDataParallel as DDP
from apex.parallel import Reducer, _reduction, _status, create_syncbn_process_group
from apex.parallel.process_groups import timeout_of


class Expert(nn.Module):
    """Uses its layer, or hands over what it got."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 5)

    def forward(self, x, use):
        return self.layer(x) if use else x


def _idle(mesh):
    """A pass that reaches no parameter counts as 0: through a result that is computed, and one that is a leaf."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for options in ({}, {"message_size": 1}, {"delay_allreduce": True}):
        ddp = DDP(Expert(), **options)
        for step, leaf in enumerate((False, True, False, True)):
            x = mine(rows(step)).requires_grad_()
            ddp.zero_grad()
            ddp(x if leaf else x * 1.0, rank == 0).sum().backward()
            alone = Expert()
            alone(rows(step)[: len(x)], True).sum().backward()
            close(grads(ddp), [g / ranks for g in grads(alone)])
            assert x.grad is not None and not x._backward_hooks
        ddp.zero_grad()
        ddp(x * 1.0, False).sum().backward()  # no rank
        assert grads(ddp) == [None, None]
        with collectives() as calls:  # nor does a pass that accumulates nothing
            torch.autograd.grad(ddp(x * 1.0, False).sum(), x)
            torch.autograd.grad(ddp(x, True).sum(), x)
        assert not calls


def _empty_backward(mesh):
    """A rank without a loss takes part by a call; disabled, it says nothing."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ddp, alone = DDP(network(), 20), network()
    for step in range(3):
        ddp.zero_grad()
        alone.zero_grad()
        loss_of(alone(rows(step)[: len(mine(rows()))])).backward()
        if rank == 0:
            loss_of(ddp(mine(rows(step)))).backward()
        else:
            ddp.empty_backward()
        close(grads(ddp), [g / ranks for g in grads(alone)])
    ddp.disable_allreduce()
    with collectives() as calls:
        ddp.empty_backward()
    assert not calls


def _empty_batches(mesh):
    """Rows 0 on one rank: gradients of zeros there."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ddp, alone = DDP(network(), 20), network()
    for step in range(2):
        ddp.zero_grad()
        alone.zero_grad()
        alone(rows(step)[: len(mine(rows()))]).square().sum().backward()
        ddp(mine(rows(step))[: None if rank == 0 else 0]).square().sum().backward()
        close(grads(ddp), [g / ranks for g in grads(alone)])


class Fuse(nn.Module):
    """Hands over what it gets, and raises in the backward pass while it is lit."""

    def __init__(self):
        super().__init__()
        self.lit = False

    def forward(self, x):
        x.register_hook(self._raise)
        return x

    def _raise(self, grad):
        if self.lit:
            raise ArithmeticError("on purpose")


def _one_rank_raises(mesh):
    """In a pass, early and late in it and in the first one too: every rank raises, then all run it again."""
    rank = dist.get_rank()
    for who in ((0,), (1,), range(dist.get_world_size())):
        for place in (1, 2):  # nothing was sent yet; all but the first layer was
            module, whole, fuse = network(), network(), Fuse()
            parts = list(module)
            layers = [*parts[: 5 - 2 * place], fuse, *parts[5 - 2 * place :]]
            ddp = DDP(nn.Sequential(*layers), 1)
            for step in range(4):
                fuse.lit = step != 1 and rank in who
                ddp.zero_grad()
                loss = loss_of(ddp(mine(rows(step))))
                if step != 1:
                    words = ("on purpose",) if fuse.lit else ("raised", "zero_grad")
                    with raises((ArithmeticError, RuntimeError), *words):
                        loss.backward(retain_graph=True)
                    dist.all_reduce(torch.zeros(3, dtype=torch.int64))  # what a handler may say to others
                    fuse.lit = False
                    ddp.zero_grad()
                    if step == 2:
                        loss = loss_of(ddp(mine(rows(step))))  # or the forward pass again
                loss.backward()
                whole.zero_grad()
                loss_of(whole(rows(step))).backward()
                close(grads(module), grads(whole))


class LateOnHost:
    """Statuses as an accelerator has them: read at the end of the next pass."""

    def __init__(self):
        self._status = None

    def put(self, status):
        self._status = status.clone()

    def read(self):
        status, self._status = self._status, None
        return list(map(bool, _status.FINE)) if status is None else status.ne(0).tolist()


def _told_a_pass_later(mesh):
    """As on an accelerator: who raised is told to the others at the end of the next pass, whose mean is right, and so
    are those that follow."""

    def check(reduction, who, late=None):
        reduction.wait()
        if late is not None:
            late.put(reduction.status)

    rank, usual = dist.get_rank(), _reduction.Reduction.check
    module, whole, fuse = network(), network(), Fuse()
    ddp = DDP(nn.Sequential(*list(module)[:3], fuse, *list(module)[3:]), 1)
    ddp._live.late, _reduction.Reduction.check, told = LateOnHost(), check, []
    try:
        for step in range(7):
            fuse.lit = rank == 1 and step == 2
            ddp.zero_grad()
            try:
                loss_of(ddp(mine(rows(step)))).backward()
            except (ArithmeticError, RuntimeError) as error:
                told.append((step, type(error).__name__))
            if step != 2:
                whole.zero_grad()
                loss_of(whole(rows(step))).backward()
                close(grads(module), grads(whole))
    finally:
        _reduction.Reduction.check = usual
    assert told == [(2, "ArithmeticError") if rank == 1 else (3, "RuntimeError")], told


def _raises_in_forward(mesh):
    module, whole = network(), network()
    ddp = DDP(module, 20)
    for step in range(3):
        ddp.zero_grad()
        if dist.get_rank() == 1:
            with contextlib.suppress(RuntimeError):
                ddp(torch.zeros(1, 4))  # of another width
        loss_of(ddp(mine(rows(step)))).backward()
        whole.zero_grad()
        loss_of(whole(rows(step))).backward()
        close(grads(module), grads(whole))


def _hook_that_raises(mesh):
    """The gradient of the last parameter of all: what is behind it was sent, and still no rank takes it for a mean."""
    module = network()
    ddp = DDP(module, 1)
    loss_of(ddp(mine(rows()))).backward()
    lit = [dist.get_rank() == 1]

    def hook(grad):
        if lit.pop() if lit else False:
            raise ArithmeticError("on purpose")

    module[0].weight.register_hook(hook)
    ddp.zero_grad()
    loss = loss_of(ddp(mine(rows(1))))
    with raises((ArithmeticError, RuntimeError)):
        loss.backward(retain_graph=True)
    ddp.zero_grad()
    loss.backward()
    whole = network()
    loss_of(whole(rows(1))).backward()
    close(grads(module), grads(whole))


def _frozen_on_some_ranks(mesh):
    """Named on every rank, with one bucket and with several, before and after the first pass; then all goes on."""
    rank = dist.get_rank()
    for size in (1, 10**6):
        for first in (0, 1):
            for wanted in (False, True):
                module, whole = network(), network()
                for model in (module, whole):
                    model[2].requires_grad_(not wanted)
                ddp = DDP(module, size)
                for step in range(first):
                    loss_of(ddp(mine(rows(step)))).backward()
                module[2].requires_grad_(wanted if rank == 1 else not wanted)
                for _ in range(2):
                    ddp.zero_grad()
                    with raises(RuntimeError, "some ranks only", "alike on every rank"):
                        loss_of(ddp(mine(rows(5)))).backward()
                for model in (module, whole):
                    model[2].requires_grad_(wanted)
                for step in range(2):
                    ddp.zero_grad()
                    whole.zero_grad()
                    loss_of(ddp(mine(rows(step)))).backward()
                    loss_of(whole(rows(step))).backward()
                    for p, q in zip(module.parameters(), whole.parameters(), strict=True):
                        assert (p.grad is None) == (q.grad is None)
                        assert p.grad is None or torch.allclose(p.grad, q.grad, rtol=1e-6, atol=1e-6)


def _others_thawed(mesh):
    """Every rank's set changes, but not alike; and one rank alone asks for new buckets."""
    rank = dist.get_rank()
    module = network()
    module[0].requires_grad_(False)
    module[2].requires_grad_(False)
    ddp = DDP(module, 1)
    loss_of(ddp(mine(rows()))).backward()
    module[0 if rank else 2].requires_grad_(True)
    ddp.zero_grad()
    with raises(RuntimeError, "require gradients", "differ"):
        loss_of(ddp(mine(rows()))).backward()
    module.requires_grad_(True)
    for _ in range(2):
        ddp.zero_grad()
        loss_of(ddp(mine(rows()))).backward()
        same_on_all_ranks(grads(module))
    ddp.needs_refresh = rank == 0
    ddp.zero_grad()
    with raises(RuntimeError, "some ranks only"):
        loss_of(ddp(mine(rows()))).backward()
    ddp.needs_refresh = False
    loss_of(ddp(mine(rows()))).backward()


def _reducer_in_trouble(mesh):
    """A parameter frozen on one rank, a gradient on one rank that is sparse: named everywhere, then it goes on."""
    rank = dist.get_rank()
    module = network()
    reducer = Reducer(module)
    module[2].requires_grad_(rank != 1)
    loss_of(module(mine(rows()))).backward()
    with raises(RuntimeError, "some ranks only"):
        reducer.reduce()
    module[2].requires_grad_(True)
    module.zero_grad()
    loss_of(module(mine(rows()))).backward()
    kept = module[0].weight.grad
    if rank == 1:
        module[0].weight.grad = kept.to_sparse()
    with raises((TypeError, RuntimeError), *(("sparse",) if rank == 1 else ("raised",))):
        reducer.reduce()
    module[0].weight.grad = kept
    reducer.reduce()
    whole = network()
    loss_of(whole(rows())).backward()
    close(grads(module), grads(whole))
    module[2].requires_grad_(False)  # on every rank
    module.zero_grad()
    whole[2].requires_grad_(False)
    whole.zero_grad()
    loss_of(module(mine(rows()))).backward()
    loss_of(whole(rows())).backward()
    reducer.reduce()
    close([g for g in grads(module) if g is not None], [g for g in grads(whole) if g is not None])


class Phase(nn.Module):
    """A parameter whose gradient autograd hands over with torch's lazy negative bit: d/dp = 1 for each element."""

    def __init__(self, count=1):
        super().__init__()
        self.p = nn.Parameter(torch.zeros(count))

    def forward(self, factor):
        z = torch.complex(torch.zeros_like(self.p), self.p * 1.0)
        return (
            z.conj() * torch.complex(torch.zeros_like(self.p), torch.ones_like(self.p))
        ).real.sum() * factor


def _strange_gradients(mesh):
    """Gradients whose bytes are not their values: negative, conjugate, copy-on-write, expanded, strided."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mean = (ranks + 1) / 2
    for count in (1, 3):
        ddp = DDP(Phase(count))
        for _ in range(3):
            ddp.zero_grad()
            ddp(rank + 1.0).backward()
            assert ddp.module.p.grad.eq(mean).all(), ddp.module.p.grad
    values = torch.arange(6.0).view(2, 3) * (rank + 1)
    wanted = torch.arange(6.0).view(2, 3) * mean
    cow = torch._lazy_clone(values)
    given = {
        "negative": (-values)._neg_view(),
        "copy on write": cow,
        "transposed": values.t().contiguous().t(),
        "strided": torch.stack([values, values], -1)[..., 0],
    }
    for name, grad in given.items():
        for retain in (False, True):
            module = nn.Module()
            module.p = nn.Parameter(torch.zeros(2, 3))
            ddp = DDP(module, retain_allreduce_buffers=retain)
            module.p.grad = grad.clone() if retain and name != "negative" else grad
            ddp.allreduce_fallback()
            assert torch.equal(module.p.grad.resolve_neg(), wanted), (name, retain, module.p.grad)
            if not retain and name != "negative":
                assert module.p.grad is grad
            grad = values if name != "negative" else (-values)._neg_view()
    assert torch.equal(values, torch.arange(6.0).view(2, 3) * (rank + 1))  # what the lazy clone shared
    module = nn.Module()
    module.p = nn.Parameter(torch.zeros(2, 3))
    module.p.grad = torch.full((1, 1), rank + 1.0).expand(2, 3)
    reducer = Reducer(module)
    reducer.reduce()
    assert module.p.grad.eq(mean).all()
    module.q = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    reducer = Reducer(module)
    module.q.grad = torch.full((2,), complex(1.0, rank + 1.0)).conj()
    reducer.reduce()
    assert module.q.grad.eq(complex(1.0, -mean)).all()


def _defaults(mesh):
    """Under other default dtypes and on another default device the numbers are the same."""
    batches = [mine(rows(step)) for step in range(3)]
    found = []
    for dtype, device in (
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float16, None),
        (torch.float64, None),
        (torch.float32, "meta"),
    ):
        module = network()
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)
        try:
            ddp = DDP(module, 20)
            for batch in batches:
                ddp.zero_grad()
                loss_of(ddp(batch)).backward()
            Reducer(module).reduce()
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)
        found.append(grads(module))
    for others in found[1:]:
        close(others, found[0], 0)


def _absent(mesh):
    """Where a rank runs no pass the others are told, when the time is over."""
    groups = [dist.new_group() for _ in range(2)]
    ddp = DDP(network(), 1, num_allreduce_streams=2, allreduce_communicators=(groups, [None, None]))
    for group in groups:
        shorten(group)
    if dist.get_rank() == 0:
        loss = loss_of(ddp(mine(rows())))
        with raises(RuntimeError, "in vain", "other ranks", "empty_backward()"):
            loss.backward()


def _groups_of_its_own(mesh):
    """Groups that are made on the way have the time that the ranks were given, in which an absent one is noticed."""
    given = timeout_of()
    assert given not in (None, dist.distributed_c10d.default_pg_timeout)
    ddp = DDP(network(), 1, num_allreduce_streams=2)
    assert [timeout_of(group) for group in ddp._live.groups] == [given, given]
    assert timeout_of(create_syncbn_process_group(dist.get_world_size())) == given


def _same_loss_twice(mesh):
    """retain_graph, then backward() of the same loss on one rank after the others: each reduces once."""
    module, whole = network(), network()
    ddp = DDP(module, 20)
    for step in range(2):
        ddp.zero_grad()
        whole.zero_grad()
        loss, other = loss_of(ddp(mine(rows(step)))), loss_of(whole(rows(step)))
        for _ in range(3):
            loss.backward(retain_graph=True)
            other.backward(retain_graph=True)
        close(grads(module), grads(whole), 1e-5)
        assert all(calls == gathered(calls)[0] for calls in gathered(len(ddp._live.reductions)))


CASES = {
    "idle": _idle,
    "empty_backward": _empty_backward,
    "empty_batches": _empty_batches,
    "one_rank_raises": _one_rank_raises,
    "told_a_pass_later": _told_a_pass_later,
    "raises_in_forward": _raises_in_forward,
    "hook_that_raises": _hook_that_raises,
    "frozen_on_some_ranks": _frozen_on_some_ranks,
    "others_thawed": _others_thawed,
    "reducer_in_trouble": _reducer_in_trouble,
    "strange_gradients": _strange_gradients,
    "defaults": _defaults,
    "same_loss_twice": _same_loss_twice,
    "absent": _absent,
    "groups_of_its_own": _groups_of_its_own,
}
