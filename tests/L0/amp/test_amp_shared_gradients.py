"""Gradients that lie in the same memory, under every level of amp."""

from __future__ import annotations

import pytest
import torch
from added_views import Net, assert_same
from amp_runs import LEVELS, forget

from apex import amp
from apex.optimizers import FusedAdam, FusedLAMB, FusedLARS, FusedSGD

MAKERS = {
    "torch": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "SGD": lambda ps: FusedSGD(ps, lr=0.1, momentum=0.9),
    "SGD, scaled gradients": lambda ps: FusedSGD(ps, lr=0.1, materialize_master_grads=False),
    "Adam": lambda ps: FusedAdam(ps, lr=0.1),
    "LAMB": lambda ps: FusedLAMB(ps, lr=0.1),
    "LARS": lambda ps: FusedLARS(ps, lr=0.1),
}


def under_amp(level, make, shared, delayed, two):
    """The last gradients and parameters of a run of two passes a step. two: each optimizer has one of each pair."""
    forget()
    net = Net()
    lists = [[net.position, net.a], [net.token, net.b]] if two else [list(net.parameters())]
    net, optimizers = amp.initialize(
        net, [make(ps) for ps in lists], opt_level=level, loss_scale=8.0, verbosity=0
    )
    params = list(net.parameters())
    if not shared:
        for p in params:
            p.register_hook(lambda grad: grad.clone())
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for last in (False, True):
            with amp.scale_loss(net(), optimizers, delay_unscale=delayed and not last) as loss:
                loss.backward()
        masters = [p.grad.clone() for optimizer in optimizers for p in amp.master_params(optimizer)
                   if p.grad is not None]  # fmt: skip
        for optimizer in optimizers:
            optimizer.step()
    return masters + params


@pytest.mark.parametrize("two", [False, True], ids=["one optimizer", "two"])
@pytest.mark.parametrize("delayed", [False, True], ids=["at once", "delayed"])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("level", LEVELS)
def test_amp(level, name, delayed, two):
    found, expected = (under_amp(level, MAKERS[name], shared, delayed, two) for shared in (True, False))
    assert len(found) == len(expected) >= 4
    assert_same(found, expected, rtol=0, atol=0)
