"""Gradients that wait to be unscaled (delay_unscale) while something else happens."""

from __future__ import annotations

import amp_runs as runs
import pytest
import torch
from torch import nn

from apex import amp

KINDS = list(runs.POLICIES)


@pytest.mark.parametrize("first_step", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_another_pass_lowers_the_scale(kind, first_step):
    """Another optimizer's gradients overflow: those that wait get the scale of those that come."""
    found = []
    for overflows in (False, True):
        other = nn.Linear(2, 1, dtype=torch.float32, device="cpu")
        (model, other), (optimizer, second) = runs.start(
            kind, runs.plain(), other, loss_scale="dynamic", dynamic_init_scale=2.0**8
        )
        if not first_step:
            runs.train(model, optimizer, 1)
            optimizer.zero_grad()
        runs.backward(runs.loss_of(model, 1), optimizer, delay_unscale=True)
        if overflows:
            x = torch.full((1, 2), float("inf"), dtype=torch.float32, device="cpu")
            runs.backward(other(x).float().sum(), second)
            second.step()
        runs.backward(runs.loss_of(model, 2), optimizer, delay_unscale=True)
        runs.backward(runs.loss_of(model, 3), optimizer)
        optimizer.step()
        assert runs.scaler().loss_scale() == (2.0**7 if overflows else 2.0**8)
        found.append(runs.values(model) + runs.values(optimizer))
    # Powers of two change no digit, but float16 holds fewer of the smallest gradients at a smaller scale.
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("scale", [2.0**4, 2.0**10])
@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_that_is_set_meanwhile(kind, scale):
    found = []
    for other in (2.0**8, scale):
        model, optimizer = runs.start(kind, loss_scale=2.0**8)
        runs.backward(runs.loss_of(model, 1), optimizer, delay_unscale=True)
        state = amp.state_dict()
        state["loss_scaler0"]["loss_scale"] = other
        amp.load_state_dict(state)
        runs.backward(runs.loss_of(model, 2), optimizer)
        optimizer.step()
        found.append(runs.values(model) + runs.values(optimizer))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)


def test_a_sparse_gradient():
    weights = []
    for scale in (8.0, 4.0):
        runs.forget()
        model = nn.Embedding(5, 3, sparse=True, dtype=torch.float32, device="cpu")
        nn.init.ones_(model.weight)
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = runs.initialize(model, sgd, opt_level="O1", loss_scale=8.0)
        x = torch.tensor([1, 1, 4], device="cpu", dtype=torch.int64)
        runs.backward(model(x).sum(), optimizer, delay_unscale=True)
        runs.scaler()._loss_scale = scale
        runs.backward(model(x).sum(), optimizer)
        optimizer.step()
        weights.append(model.weight.detach().clone())
    assert torch.equal(*weights)


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_that_is_there_is_not_added_again(kind):
    """As torch refuses it, and before anything changes: the optimizer goes on."""
    found = []
    for add in (False, True):
        model, optimizer = runs.start(kind, loss_scale=8.0)
        runs.train(model, optimizer, 1)
        if add:
            for params in (model.parameters(), model[0].weight):
                with pytest.raises(ValueError, match="more than one parameter group"):
                    optimizer.add_param_group({"params": params})
        assert len(optimizer.param_groups) == 1
        runs.train(model, optimizer, 2, first=1)
        found.append(runs.values(model) + runs.values(optimizer))
    assert runs.equal(*found)
