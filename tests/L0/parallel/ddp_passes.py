"""Cases of test_distributed.py: backward passes of all sorts."""

from __future__ import annotations

import torch
from ddp_common import (
    Probe,
    close,
    collectives,
    grads,
    loss_of,
    mine,
    network,
    raises,
    rows,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from apex.parallel import DistributedDataParallel as DDP


def _accumulated(mesh):
    """One message for two passes."""
    module, whole = network(), network()
    ddp = DDP(module, 20)
    for round in range(3):
        ddp.zero_grad()
        whole.zero_grad()
        with collectives() as calls:
            ddp.disable_allreduce()
            loss_of(ddp(mine(rows(2 * round)))).backward()
            assert not calls
            ddp.enable_allreduce()
            loss_of(ddp(mine(rows(2 * round + 1)))).backward()
        assert calls
        loss_of(whole(rows(2 * round))).backward()
        loss_of(whole(rows(2 * round + 1))).backward()
        close(grads(module), grads(whole))


def _several_passes(mesh):
    """Two backward passes of one forward pass, two forward passes of one backward pass, a gradient's gradient."""
    module, whole = network(), network()
    ddp = DDP(module, 20)

    def run(model, take):
        loss = loss_of(model(take(rows(0))))
        loss.backward(retain_graph=True)
        loss.backward()
        (loss_of(model(take(rows(1)))) + loss_of(model(take(rows(2))))).backward()
        x = take(rows(3)).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(1).mean(), x, create_graph=True)
        (slope * len(x)).square().sum(1).mean().backward()

    for _ in range(2):
        ddp.zero_grad()
        whole.zero_grad()
        run(ddp, mine)
        run(whole, lambda x: x)
        close(grads(module), grads(whole))
    with collectives() as calls, torch.no_grad():
        ddp(mine(rows()))
    x = mine(rows()).requires_grad_()
    with collectives() as calls:
        torch.autograd.grad(ddp(x).sum(), x)
    assert not calls


class Checkpointed(nn.Module):
    def __init__(self, module, reentrant, shared=False):
        super().__init__()
        self.module, self.reentrant, self.shared = module, reentrant, shared

    def forward(self, x):
        first, *rest = self.module
        x = first(x)
        for layer in rest:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        if self.shared:
            x = checkpoint(
                self.module,
                checkpoint(nn.functional.pad, x, (0, 3), use_reentrant=self.reentrant),
                use_reentrant=self.reentrant,
            )
        return x


def _checkpoints(mesh):
    whole = network()
    for reentrant in (False, True):
        module = network()
        ddp = DDP(Checkpointed(module, reentrant), 20)
        outside = DDP(network(), 20)
        for step in range(3):
            for model in (whole, module, outside):
                model.zero_grad()
            loss_of(whole(rows(step))).backward()
            with collectives() as calls:
                loss_of(ddp(mine(rows(step)))).backward()
            assert len(calls) == (len(ddp._live.buckets) if step else 1) and len(ddp._live.buckets) > 1
            close(grads(module), grads(whole))
            x = mine(rows(step)).requires_grad_()
            loss_of(checkpoint(outside, x, use_reentrant=reentrant)).backward()
            close(grads(outside), grads(whole))


def _checkpoints_that_share(mesh):
    """Reentrant checkpoints give a shared parameter its gradient in parts, the first of which may be gone."""
    for options, fails in (({"message_size": 1}, True), ({"delay_allreduce": True}, False)):
        module, whole = network(), network()
        ddp = DDP(Checkpointed(module, True, shared=True), **options)
        loss_of(Checkpointed(whole, False, shared=True)(rows())).backward()
        for step in range(2):
            ddp.zero_grad()
            if step and fails:
                with raises(RuntimeError, "twice", "use_reentrant=False", "delay_allreduce=True"):
                    loss_of(ddp(mine(rows()))).backward()
            else:
                loss_of(ddp(mine(rows()))).backward()
                close(grads(module), grads(whole))


def _after_an_error(mesh):
    """A backward pass that raises leaves nothing behind."""
    module, whole = network(), network()
    switch = {"on": False}

    def call():
        if switch["on"]:
            raise ArithmeticError("on purpose")

    ddp = DDP(nn.Sequential(module[:2], Probe(call), module[2:]), 1)
    for step, fails in enumerate((True, False, True, False, False)):
        switch["on"] = fails
        ddp.zero_grad()
        whole.zero_grad()
        if fails:
            with raises(ArithmeticError):
                loss_of(ddp(mine(rows(step)))).backward()
        else:
            loss_of(ddp(mine(rows(step)))).backward()
            loss_of(whole(rows(step))).backward()
            close(grads(module), grads(whole))


CASES = {
    "accumulated": _accumulated,
    "several_passes": _several_passes,
    "checkpoints": _checkpoints,
    "checkpoints_that_share": _checkpoints_that_share,
    "after_an_error": _after_an_error,
}
