"""Fused optimizers write the model's parameters behind master weights themselves; where they cannot, amp copies."""

from __future__ import annotations

import pytest
import torch
from amp_runs import backward, forget, initialize, loss_of, network, overflow, train, values
from torch import nn

from apex import amp
from apex._loader import bindings
from apex.optimizers import (
    FusedAdam,
    FusedLAMB,
    FusedLARS,
    FusedMixedPrecisionLamb,
    FusedSGD,
    _fused_optimizer,
)
from apex.optimizers._model_copies import ModelCopies
from apex.optimizers._plan import ReferencePlan

LEVELS = {"O2": torch.float16, "O5": torch.bfloat16}
OPTIMIZERS = {
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01),
    "FusedAdam capturable": lambda params: FusedAdam(params, lr=0.01, capturable=True),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.05, momentum=0.9, dampening=0.5),
    "FusedSGD model gradients": lambda params: FusedSGD(
        params, lr=0.05, momentum=0.9, materialize_master_grads=False
    ),
    "FusedLARS": lambda params: FusedLARS(params, lr=0.05, momentum=0.9),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=0.01),
    "FusedMixedPrecisionLamb": lambda params: FusedMixedPrecisionLamb(params, lr=0.01),
}


def start(level, kind, copies):
    """A model with half and full precision parameters, and its optimizer of two groups; copies: amp's, counted."""
    forget()
    model = network()
    groups = [dict(params=list(model[:2].parameters())), dict(params=list(model[2:].parameters()), lr=0.02)]
    model, optimizer = initialize(model, OPTIMIZERS[kind](groups), opt_level=level)
    copy = optimizer._master_params_to_model_params
    optimizer._master_params_to_model_params = lambda: (copies.append(1), copy())
    return model, optimizer


def run(model, optimizer):
    """Everything that there is after steps, with one that is skipped among them."""
    train(model, optimizer, 3)
    if amp._amp_state.loss_scalers[0].dynamic:
        overflow(model, optimizer)
        optimizer.step()
    train(model, optimizer, 2, first=3)
    states = [t for p in amp.master_params(optimizer) for t in optimizer.state[p].values()]
    steps = [
        torch.tensor(int(group.get("step", 0)), dtype=torch.int64, device="cpu")
        for group in optimizer.param_groups
    ]
    return values(model) + values(optimizer) + states + steps


@pytest.fixture(params=["plan", "reference plan"])
def plans(request, monkeypatch):
    if request.param == "reference plan":
        monkeypatch.setattr(
            _fused_optimizer,
            "make_plan",
            lambda names, written, lists, *rest: ReferencePlan(names, lists, *rest),
        )
    elif bindings.load().module is None:
        pytest.skip("no binding fits this torch")


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_one_launch_writes_both(level, kind, plans, monkeypatch):
    copies = []
    found = run(*start(level, kind, copies))
    assert not copies
    monkeypatch.setattr(ModelCopies, "_models", lambda self, params, group: None)
    expected = run(*start(level, kind, copies))
    assert copies
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_models_are_roundings_of_masters(level, kind, plans):
    model, optimizer = start(level, kind, [])
    for step in range(3):
        before = values(optimizer)
        train(model, optimizer, 1, first=step)
        for p, master, old in zip(model.parameters(), amp.master_params(optimizer), before, strict=True):
            assert torch.equal(p, master.to(p.dtype)) and not torch.equal(master, old)
    assert {p.dtype for p in model.parameters()} == {torch.float32, LEVELS[level]}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_plans_are_kept(level, kind, plans):
    """Whosever gradients are read, the states that a plan depends on are those of the groups' parameters."""
    model, optimizer = start(level, kind, [])
    train(model, optimizer, 1)
    before = {key: plan for key, (_, plan) in optimizer._plans.items()}
    train(model, optimizer, 2, first=1)
    assert all(optimizer._plans[key][1] is plan for key, plan in before.items())
    for _, plan in optimizer._plans.values():
        for p in amp.master_params(optimizer):
            optimizer.state[p] = dict(optimizer.state[p], more=1)
        assert plan.state_changed(optimizer.state)


@pytest.mark.parametrize("kind", ["FusedAdam", "FusedSGD"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_gradient_now_and_then(level, kind, plans):
    """A parameter without gradient gets neither step nor copy, and both when it has one again."""
    model, optimizer = start(level, kind, [])
    for step in range(4):
        optimizer.zero_grad()
        backward(loss_of(model, step), optimizer)
        last, masters = model[3], list(amp.master_params(optimizer))
        before = [t.detach().clone() for t in (last.weight, masters[-2])]
        if step % 2:
            masters[-2].grad = None
        optimizer.step()
        after = [t.detach() for t in (last.weight, masters[-2])]
        assert all(torch.equal(a, b) == bool(step % 2) for a, b in zip(before, after, strict=True))
        assert torch.equal(last.weight, masters[-2].to(last.weight.dtype))


@pytest.mark.parametrize("kind", ["FusedAdam", "FusedSGD"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_model_laid_out_anew(level, kind, plans):
    """Its weights no longer lie as their masters do: amp copies them by index."""
    model = nn.Conv2d(4, 6, 3, dtype=torch.float32, device="cpu")
    model, optimizer = initialize(model, OPTIMIZERS[kind](model.parameters()), opt_level=level)
    x = torch.randn(2, 4, 5, 5, dtype=torch.float32, device="cpu")
    for step in range(3):
        if step == 1:
            model.to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        backward(model(x).square().mean(), optimizer)
        optimizer.step()
        for p, master in zip(model.parameters(), amp.master_params(optimizer), strict=True):
            assert torch.equal(p, master.to(p.dtype))


def test_sgd_without_momentum_leaves_it_to_amp(plans):
    """Its op has no list of models."""
    model = network()
    model, optimizer = initialize(model, FusedSGD(model.parameters(), lr=0.05), opt_level="O2")
    for step in range(2):
        before = model[3].weight.detach().clone()
        train(model, optimizer, 1, first=step)
        assert not optimizer.writes_models() and not torch.equal(model[3].weight, before)
        for p, master in zip(model.parameters(), amp.master_params(optimizer), strict=True):
            assert torch.equal(p, master.to(p.dtype))
