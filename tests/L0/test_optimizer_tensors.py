"""Steps of every optimizer on gradients whose bytes are not their values, on tensors without values, and after a step
that raised."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch._subclasses import FakeTensorMode

from apex._loader import bindings
from apex.contrib.clip_grad import clip_grad_norm_
from apex.fp16_utils import FP16_Optimizer
from apex.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedLARS,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
    _fused_optimizer,
    _gradient_norm,
)
from apex.optimizers._plan import ReferencePlan
from apex.parallel.LARC import LARC

F32 = torch.float32
OPTIMIZERS = {
    "SGD": lambda ps: FusedSGD(ps, lr=0.1),
    "SGD, momentum": lambda ps: FusedSGD(ps, lr=0.1, momentum=0.9),
    "Adam": lambda ps: FusedAdam(ps, lr=0.1),
    "Adam, capturable": lambda ps: FusedAdam(ps, lr=0.1, capturable=True),
    "Adam, master weights": lambda ps: FusedAdam(ps, lr=0.1, master_weights=True),
    "LAMB": lambda ps: FusedLAMB(ps, lr=0.1),
    "Adagrad": lambda ps: FusedAdagrad(ps, lr=0.1),
    "NovoGrad": lambda ps: FusedNovoGrad(ps, lr=0.1),
    "LARS": lambda ps: FusedLARS(ps, lr=0.1),
    "MixedPrecisionLamb": lambda ps: FusedMixedPrecisionLamb(ps, lr=0.1),
}
STATES = {"Adagrad": {"sum"}, "SGD": set(), "NovoGrad": {"exp_avg"}}


@pytest.fixture(params=["plan", "reference plan"])
def plans(request, monkeypatch):
    """Plans of the bindings, and those where no binding fits."""
    if request.param == "plan":
        if bindings.load().module is None:
            pytest.skip("no binding fits this torch")
        return
    bindings.load()

    def reference_plan(names, written, lists, *rest):
        return (
            ReferencePlan(names, lists, *rest) if rest[1:] else ReferencePlan(names, lists, *rest, (), None)
        )

    for module in (_fused_optimizer, _gradient_norm):
        monkeypatch.setattr(module, "make_plan", reference_plan)


def values(*shape, seed=1):
    return torch.randn(shape, dtype=F32, device="cpu", generator=torch.Generator().manual_seed(seed))


def parameters():
    return [torch.nn.Parameter(values(3, 4)), torch.nn.Parameter(values(5))]


def give(params, seed, lazy):
    for i, p in enumerate(params):
        gradient = values(*p.shape, seed=seed + i)
        p.grad = torch._neg_view(-gradient) if lazy else gradient


def trained(name, lazy, steps=3):
    params = parameters()
    optimizer = OPTIMIZERS[name](params)
    for step in range(steps):
        give(params, 10 * step, lazy and step != 1)  # lazy ones come and go
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert not any(p.grad.any() for p in params)
    return params


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_negative_gradients(plans, name):
    """Autograd makes them: the imaginary part of a conjugate has torch's lazy negative bit."""
    for found, expected in zip(trained(name, lazy=True), trained(name, lazy=False), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_gradient_that_autograd_hands_over():
    p = torch.nn.Parameter(torch.zeros(1, dtype=F32, device="cpu"))
    zero, one = torch.zeros(1, dtype=F32, device="cpu"), torch.ones(1, dtype=F32, device="cpu")
    optimizer = FusedSGD([p], lr=0.5)
    (torch.complex(zero, p).conj() * torch.complex(zero, one)).real.sum().backward()
    assert p.grad.is_neg() and p.grad.item() == 1
    optimizer.step()
    assert p.item() == -0.5


def test_negative_gradients_are_unscaled_in_place(plans):
    params = parameters()
    optimizer = FusedSGD(params, lr=0.5)
    give(params, 0, lazy=True)
    before = [p.detach().clone() for p in params]
    gradients = [p.grad.clone() for p in params]
    optimizer.grad_scale = torch.tensor(2.0, dtype=F32, device="cpu")
    optimizer.found_inf = torch.tensor(0.0, dtype=F32, device="cpu")
    optimizer.step()
    for p, old, gradient in zip(params, before, gradients, strict=True):
        torch.testing.assert_close(p.grad.resolve_neg(), gradient / 2, rtol=0, atol=0)
        torch.testing.assert_close(p.detach(), old - gradient / 4)


def test_negative_gradients_are_clipped():
    found, expected = parameters(), parameters()
    give(found, 0, lazy=True)
    give(expected, 0, lazy=False)
    torch.testing.assert_close(
        clip_grad_norm_(found, 1.0), torch.nn.utils.clip_grad_norm_(expected, 1.0).reshape(())
    )
    for p, q in zip(found, expected, strict=True):
        torch.testing.assert_close(p.grad.resolve_neg(), q.grad)


def test_negative_gradients_under_larc():
    params, twins = parameters(), parameters()
    for ps, lazy in ((params, True), (twins, False)):
        optimizer = LARC(torch.optim.SGD(ps, lr=0.1))
        give(ps, 0, lazy)
        optimizer.step()
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q)


def test_negative_gradients_become_those_of_masters():
    """torch's CPU copies between float16 and float32 pass over the bit."""
    params, twins = ([torch.nn.Parameter(p.half()) for p in parameters()] for _ in range(2))
    for ps, lazy in ((params, True), (twins, False)):
        optimizer = FP16_Optimizer(torch.optim.SGD(ps, lr=0.1), verbose=False)
        for i, p in enumerate(ps):
            gradient = values(*p.shape, seed=i).half()
            p.grad = torch._neg_view(-gradient) if lazy else gradient
        optimizer.update_master_grads()
        optimizer.step()
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)


# ---- tensors without values ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["meta", "fake"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_on_tensors_without_values_makes_states_alone(plans, name, kind):
    """What memory estimators do: torch's own optimizers take such steps."""
    with FakeTensorMode() if kind == "fake" else contextlib.nullcontext():
        device = "meta" if kind == "meta" else "cpu"
        params = [torch.nn.Parameter(torch.empty(3, 4, dtype=F32, device=device)) for _ in range(2)]
        optimizer = OPTIMIZERS[name](params)
        for _ in range(2):
            for p in params:
                p.grad = torch.empty_like(p)
            optimizer.step()
    real = parameters()
    like = OPTIMIZERS[name](real)
    give(real, 0, lazy=False)
    like.step()
    assert optimizer.state[params[0]].keys() == like.state[real[0]].keys()
    for p in params:
        for key, state in optimizer.state[p].items():
            assert state.shape == p.shape and state.device == p.device, key
            assert state.dtype == like.state[real[0]][key].dtype, key


# ---- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_sparse_gradient_raises_the_same_at_any_step(plans, name):
    messages = []
    for steps in (0, 1):
        params = parameters()
        optimizer = OPTIMIZERS[name](params)
        for step in range(steps):
            give(params, step, lazy=False)
            optimizer.step()
        give(params, 7, lazy=False)
        params[1].grad = params[1].grad.to_sparse()
        before = [p.detach().clone() for p in params]
        with pytest.raises(RuntimeError, match="parameter 1 .*has a sparse gradient") as raised:
            optimizer.step()
        messages.append(str(raised.value))
        for p, old in zip(params, before, strict=True):
            torch.testing.assert_close(p.detach(), old, rtol=0, atol=0)
    assert messages[0] == messages[1]


@pytest.mark.parametrize("lazy", [False, True], ids=["laid out otherwise", "negative"])
def test_a_step_that_raised_leaves_no_gradient_behind(plans, lazy):
    """The copy that the kernel is given was once written over the next step's gradient."""
    a = torch.nn.Parameter(torch.zeros(2, 3, dtype=F32, device="cpu"))
    b = torch.nn.Parameter(torch.zeros(4, dtype=F32, device="cpu"))
    optimizer = FusedSGD([a, b], lr=0.0)

    def scaled(of_a, freed=False):
        a.grad, b.grad = of_a, torch.ones_like(b)
        if freed:
            b.grad.untyped_storage().resize_(0)
        optimizer.grad_scale = torch.tensor(2.0, dtype=F32, device="cpu")
        optimizer.found_inf = torch.tensor(0.0, dtype=F32, device="cpu")
        optimizer.step()

    full = lambda value, *shape: torch.full(shape, value, dtype=F32, device="cpu")  # noqa: E731
    scaled(full(1.0, 2, 3))
    with pytest.raises(ValueError, match=r"gradient of parameter\[1\] has no memory: it was freed"):
        scaled(torch._neg_view(full(7.0, 2, 3)) if lazy else full(7.0, 3, 2).t(), freed=True)
    scaled(full(100.0, 2, 3))
    assert a.grad.tolist() == full(50.0, 2, 3).tolist()
