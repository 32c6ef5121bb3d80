"""Steps of every optimizer on gradients whose bytes are not their values, on tensors without values, and after a step
that raised."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch._subclasses import FakeTensorMode

from apex._loader import bindings
from apex.contrib.clip_grad import clip_grad_norm_
from apex.contrib.optimizers import FP16_Optimizer as ContribFP16Optimizer
from apex.contrib.optimizers import FusedAdam as FirstAdam
from apex.contrib.optimizers import FusedLAMB as FirstLAMB
from apex.contrib.optimizers.fused_sgd import FusedSGD as FirstSGD
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
    lamb,
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


def a_sparse_gradient(optimizer, p):
    p.grad = p.grad.to_sparse()


def another_dtype(optimizer, p):
    p.data = p.data.to(torch.complex64)


def another_state(optimizer, p):
    kept = optimizer.state.get(p, {})
    found = [name for name, value in kept.items() if getattr(value, "shape", None) == p.shape]
    kept.update((name, values(2)) for name in found)
    return bool(found)


def option(name, value):
    def change(optimizer, p):
        optimizer.param_groups[-1][name] = value

    return change


def everything(optimizer):
    """What a step changes, in tensors and numbers of their own."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = [[p.detach(), *optimizer.state.get(p, {}).values()] for p in params]
    return copy.deepcopy([*sum(tensors, []), *(group.get("step") for group in optimizer.param_groups)])


REFUSED = {
    "sparse gradient": (a_sparse_gradient, RuntimeError),
    "dtype": (another_dtype, TypeError),
    "state": (another_state, ValueError),
    "rate": (option("lr", "fast"), TypeError),
    "two rates": (option("lr", torch.ones(2, dtype=F32, device="cpu")), ValueError),
    "one beta": (option("betas", (0.9,)), ValueError),
    "no decay": (option("weight_decay", None), TypeError),
}
FIRST = {
    "first Adam": lambda ps: FirstAdam(ps, lr=0.1),
    "first SGD": lambda ps: FirstSGD(ps, lr=0.1, momentum=0.9),
    "first LAMB": lambda ps: FirstLAMB(ps, lr=0.1),
}


@pytest.mark.parametrize("name", [*OPTIMIZERS, *FIRST])
@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("stepped", [False, True])
def test_where_one_group_is_refused_none_changes(plans, name, what, stepped):
    params = [torch.nn.Parameter(values(*shape)) for shape in ((3, 4), (5,), (6,))]
    groups = [params[:1], params[1:]]
    optimizer = {**OPTIMIZERS, **FIRST}[name]([{"params": group} for group in groups])
    change, error = REFUSED[what]

    def step():
        given = {}
        if name == "first SGD":
            outputs = [[torch.empty_like(p, requires_grad=False) for p in group] for group in groups]
            given = dict(grads=[[p.grad for p in group] for group in groups], output_params=outputs)
        optimizer.step(**given)

    give(params, 3, lazy=False)
    if stepped:
        step()
    give(params, 5, lazy=False)
    if change(optimizer, params[-1]) is False:
        return  # a state that there is not
    before = everything(optimizer)
    with pytest.raises(error):
        step()
    after = everything(optimizer)
    assert len(before) == len(after)
    assert all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(before, after, strict=True)
    )


@pytest.mark.parametrize("what", ["sparse gradient", "rate", "one beta"])
def test_a_refused_step_of_lamb_changes_nothing(what):
    params = [torch.nn.Parameter(values(3)), torch.nn.Parameter(values(3))]
    optimizer = lamb.Lamb([{"params": [p]} for p in params], lr=0.1)
    give(params, 3, lazy=False)
    change, error = REFUSED[what]
    change(optimizer, params[1])
    with pytest.raises(error):
        optimizer.step()
    assert torch.equal(params[0].detach(), values(3)) and not optimizer.state


def test_masters_have_no_gradient_after_one_that_was_refused():
    params = [torch.nn.Parameter(values(3).half()), torch.nn.Parameter(values(3).half())]
    with pytest.warns(DeprecationWarning):
        optimizer = ContribFP16Optimizer(torch.optim.SGD(params, lr=0.1), static_loss_scale=1.0)
    for p in params:
        p.grad = torch.ones_like(p)
    params[1].grad = params[1].grad.to_sparse()
    with pytest.raises((TypeError, RuntimeError), match="sparse"):
        optimizer.step()
    assert all(master.grad is None for group in optimizer.fp32_groups for master in group)


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
