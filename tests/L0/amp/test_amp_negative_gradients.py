"""Gradients with the negative bit, as autograd itself makes them, and zero tensors: read and written as values."""

from __future__ import annotations

import dataclasses

import amp_runs as runs
import lists
import pytest
import torch
import variants
from lists import F32
from torch import nn

from apex import amp
from apex._loader import bindings
from apex.contrib.clip_grad import clip_grad_norm_
from apex.fp16_utils import FP16_Optimizer
from apex.optimizers import CombinedAdam, FusedAdam, FusedSGD
from apex.parallel.LARC import LARC


@pytest.fixture(autouse=True, params=["no bindings"])
def served(request, monkeypatch):
    if request.param == "reference":
        with variants.served_by("reference"):
            yield
        return
    if request.param == "no bindings":
        loaded = dataclasses.replace(bindings.load(), module=None)
        monkeypatch.setattr(bindings, "load", lambda: loaded)
    yield


class Phase(nn.Module):
    """A phase, whose gradient autograd hands over with the negative bit, and weights."""

    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(1, dtype=F32, device="cpu"))
        self.weight = nn.Parameter(torch.ones(4, dtype=F32, device="cpu"))

    def forward(self, x):
        still = torch.zeros(1, dtype=F32, device="cpu")
        turned = torch.complex(still, self.phase.float()).conj() * torch.complex(
            still, torch.ones_like(still)
        )
        return turned.real.sum() + (self.weight.float() * x).sum()  # d / d phase = 1


X = torch.arange(4, dtype=F32, device="cpu")


def negative(values):
    """A gradient of these values with the negative bit."""
    return torch._neg_view(-values)


def test_autograd_makes_such_gradients():
    model = Phase()
    model(X).backward()
    assert model.phase.grad.is_neg() and model.phase.grad.tolist() == [1]


def twins(make):
    """The same over gradients with and without the negative bit: [parameters, gradients] of each."""
    found = []
    for mark in (negative, torch.clone):
        params = [nn.Parameter(t) for t in lists.random(F32, "cpu", ((5,), (2, 3)))]
        for p, grad in zip(params, lists.random(F32, "cpu", ((5,), (2, 3)), seed=2), strict=True):
            p.grad = mark(grad)
        result = make(params)
        found.append([[p.detach() for p in params], [p.grad for p in params], result])
    return found


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_larc(clip, decay):
    def step(params):
        LARC(torch.optim.SGD(params, lr=0.1, weight_decay=decay), clip=clip).step()

    marked, plain = twins(step)
    lists.assert_same_bits(marked[0] + marked[1], plain[0] + plain[1])


@pytest.mark.parametrize("limit", [0.5, 1e6])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clip(norm_type, limit):
    marked, plain = twins(lambda params: clip_grad_norm_(params, limit, norm_type))
    for found, wanted in zip([*marked[1], marked[2]], [*plain[1], plain[2]], strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("kind", [FusedAdam, FusedSGD])
def test_zeroing(kind):
    def zero(params):
        kind(params, lr=0.1).zero_grad(set_to_none=False)

    marked, plain = twins(zero)
    assert all(grad is not None and not grad.any() for grad in marked[1] + plain[1])


def test_zero_tensors_are_zeroed_and_adapted():
    for use in (lambda o: o.zero_grad(set_to_none=False), lambda o: LARC(o).step()):
        p = nn.Parameter(torch.ones(3, dtype=F32, device="cpu"))
        p.grad = torch._efficientzerotensor(3, dtype=F32, device="cpu")
        use(FusedSGD([p], lr=0.1))
        assert p.tolist() == [1, 1, 1] and p.grad.tolist() == [0, 0, 0]


@pytest.mark.parametrize("scale", ["dynamic", 8.0, 1.0])
@pytest.mark.parametrize("kind", [torch.optim.SGD, FusedSGD, CombinedAdam])
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_amp(level, kind, scale):
    """Two passes before each step: gradients are set aside, unscaled and added."""
    model = Phase()
    optimizer = kind(model.parameters(), lr=0.125)
    model, optimizer = runs.initialize(
        model,
        optimizer,
        opt_level=level,
        loss_scale=scale,
        dynamic_init_scale=2.0**8,
        combine_grad=kind is CombinedAdam,
    )
    for _ in range(2):
        for _ in range(2):
            runs.backward(model(X), optimizer)
        masters = list(amp.master_params(optimizer))
        assert masters[0].grad.tolist() == [2] and masters[1].grad.tolist() == [0, 2, 4, 6]
        before = masters[0].detach().clone()
        optimizer.step()
        assert (masters[0] < before).all() and torch.equal(model.phase.float(), masters[0])
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:FP16_Optimizer is of old")
@pytest.mark.parametrize("half", [True, False])
def test_fp16_optimizer(half):
    model = Phase()
    model = model.half() if half else model
    optimizer = FP16_Optimizer(
        torch.optim.SGD(model.parameters(), lr=0.125), static_loss_scale=4.0, verbose=False
    )
    optimizer.backward(model(X), update_master_grads=False)
    optimizer.loss_scale = 8.0  # what is there is rescaled
    optimizer.backward(model(X))
    assert [g.tolist() for g in optimizer.inspect_master_grad_data()[0]] == [[2], [0, 2, 4, 6]]
    assert optimizer.clip_master_grads(1e6) == pytest.approx((4 + 4 + 16 + 36) ** 0.5)
    optimizer.step()
    assert model.phase.tolist() == [-0.25]
