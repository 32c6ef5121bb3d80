"""The optimizers over combined tensors against float64 and torch, on everything that can serve them."""

from __future__ import annotations

import copy
import math
import pickle
import warnings

import amp_runs as runs
import lists
import pytest
import torch
import training
from lists import F32, F64
from torch import nn
from torch_defaults import float32_on_cpu

import apex.optimizers
from apex import amp
from apex._loader import bindings
from apex.optimizers import Lamb, _combined_optimizer, _plan

SHAPES = ((7,), (0,), (33, 5), (1,), (4, 3, 2, 2), (2050,))
NAMES = ("SGD", "Adam", "AdamW", "AdamP", "BertAdam", "Adadelta", "Lamb", "RMSprop", "RMSpropTF")
BETAS = (0.9, 0.99)


def kind(name):
    return getattr(apex.optimizers, f"Combined{name}")


# ---- formulas that torch lacks, in float64 ---------------------------------------------------------------


def moments(state, g, b1, b2):
    state["m"] = b1 * state.get("m", 0) + (1 - b1) * g
    state["v"] = b2 * state.get("v", 0) + (1 - b2) * g * g
    state["t"] = state.get("t", 0) + 1
    return state["m"], state["v"], state["t"]


def lamb(lr=1e-3, betas=BETAS, eps=1e-6, weight_decay=0.0, adam=False):
    def update(state, p, g):
        m, v, _ = moments(state, g, *betas)
        u = m / (v.sqrt() + eps) + weight_decay * p
        norms = p.norm().clamp(max=10), u.norm()
        ratio = 1.0 if adam or not all(norms) else norms[0] / norms[1]
        return p - lr * ratio * u

    return update


def bert_adam(lr, b1=0.9, b2=0.99, e=1e-6, weight_decay=0.01, rate=lambda step: 1.0):
    def update(state, p, g):
        m, v, t = moments(state, g, b1, b2)
        return p - lr * rate(t - 1) * (m / (v.sqrt() + e) + weight_decay * p)

    return update


def rmsprop_tf(
    lr=1e-2,
    alpha=0.9,
    eps=1e-10,
    weight_decay=0,
    momentum=0.0,
    centered=False,
    decoupled_decay=False,
    lr_in_momentum=True,
):
    def update(state, p, g):
        if decoupled_decay:
            p = p - weight_decay * p
        else:
            g = g + weight_decay * p
        s = state["s"] = state.get("s", 0) + (1 - alpha) * (g * g - state.get("s", 0))
        if centered:
            mean = state["mean"] = state.get("mean", 0) + (1 - alpha) * (g - state.get("mean", 0))
            s = s - mean * mean
        u = g / (s + eps).sqrt()
        if momentum > 0:
            u = state["b"] = momentum * state.get("b", 0) + (lr * u if lr_in_momentum else u)
        return p - (u if momentum > 0 and lr_in_momentum else lr * u)

    return update


def adamp(lr=1e-3, betas=BETAS, eps=1e-8, weight_decay=0, delta=0.1, wd_ratio=0.1, nesterov=False):
    def update(state, p, g):
        m, v, t = moments(state, g, *betas)
        denominator = v.sqrt() / math.sqrt(1 - betas[1] ** t) + eps
        perturb = (betas[0] * m + (1 - betas[0]) * g if nesterov else m) / denominator
        ratio = 1.0
        for view in ((p.shape[0], -1), (1, -1)) if p.dim() > 1 and p.numel() else ():
            gv, pv = g.reshape(view), p.reshape(view)
            cosine = (gv * pv).sum(1).abs() / (gv.norm(dim=1) + eps) / (pv.norm(dim=1) + eps)
            if cosine.max() < delta / math.sqrt(pv.shape[1]):
                along = pv / (pv.norm(dim=1, keepdim=True) + eps)
                perturb = perturb - (along * (along * perturb.reshape(view)).sum(1, keepdim=True)).reshape(
                    p.shape
                )
                ratio = wd_ratio
                break
        return p * (1 - lr * weight_decay * ratio) - lr / (1 - betas[0] ** t) * perturb

    return update


OWN = {"Lamb": lamb, "BertAdam": bert_adam, "RMSpropTF": rmsprop_tf, "AdamP": adamp}
# What the two groups of an optimizer are given.
CASES = [
    ("SGD", dict(lr=0.1), dict(lr=0.05)),
    ("SGD", dict(lr=0.1, momentum=0.9, weight_decay=0.1), dict(lr=0.05)),
    ("SGD", dict(lr=0.1, momentum=0.9, dampening=0.5), dict(lr=0.1, momentum=0.5, nesterov=True)),
    ("Adam", dict(lr=0.1, betas=BETAS), dict(lr=0.05, weight_decay=0.1)),
    ("Adam", dict(lr=0.1, amsgrad=True), dict(lr=0.05, weight_decay=0.1)),
    ("AdamW", dict(lr=0.1), dict(lr=0.05, weight_decay=0.3, amsgrad=True)),
    ("Adadelta", dict(), dict(lr=0.5, rho=0.5, weight_decay=0.1)),
    ("RMSprop", dict(), dict(lr=0.1, momentum=0.9, weight_decay=0.1)),
    ("RMSprop", dict(centered=True, momentum=0.5), dict(lr=0.1, centered=True)),
    ("RMSpropTF", dict(), dict(lr=0.1, momentum=0.9, weight_decay=0.1)),
    (
        "RMSpropTF",
        dict(centered=True, momentum=0.5, lr_in_momentum=False),
        dict(weight_decay=0.1, decoupled_decay=True),
    ),
    ("BertAdam", dict(lr=0.1), dict(lr=0.05, weight_decay=0)),
    ("Lamb", dict(lr=0.1, betas=BETAS), dict(lr=0.05, betas=BETAS, weight_decay=0.1)),
    ("AdamP", dict(lr=0.1, betas=BETAS), dict(lr=0.05, betas=BETAS, weight_decay=0.1, delta=3.0)),
    (
        "AdamP",
        dict(lr=0.1, betas=BETAS, nesterov=True),
        dict(lr=0.1, betas=BETAS, weight_decay=0.1, delta=0.3),
    ),
]
USUAL = {
    "SGD": dict(lr=0.1, momentum=0.9),
    "BertAdam": dict(lr=0.1, t_total=10, warmup=0.3),
    **{name: dict(lr=0.1) for name in NAMES if name not in ("SGD", "BertAdam")},
}


class Two:
    """Oracles of two groups, as one optimizer."""

    def __init__(self, name, twins, half, options):
        self.oracles = []
        for params, own in zip((twins[:half], twins[half:]), options, strict=True):
            if name in OWN:
                self.oracles.append(training.Oracle(params, OWN[name](**own)))
            else:
                self.oracles.append(getattr(torch.optim, name)(params, **own, foreach=False))

    def step(self):
        for oracle in self.oracles:
            oracle.step()


def start(name, device, options, level="O1", shapes=SHAPES, params=None, **more):
    """(optimizer under amp, its parameters, their float64 twins): two groups."""
    params = params or training.parameters(F32, device, shapes)
    twins = training.twins_of(params)
    half = len(params) // 2
    groups = [dict(params=params[:half], **options[0]), dict(params=params[half:], **options[-1])]
    optimizer = kind(name)(groups, **({"lr": 0.1} if name in ("SGD", "BertAdam") else {}))
    model = nn.ParameterList(params)
    runs.initialize(model, optimizer, opt_level=level, loss_scale=1.0, **more)
    return optimizer, params, twins


def give(params, twins, step, without=()):
    """Gradients as training.give_gradients, written into those that are there."""
    for i, (p, twin) in enumerate(zip(params, twins, strict=True)):
        (gradient,) = lists.random(p.dtype, p.device, [p.shape], seed=1000 * step + i)
        if i in without:
            continue
        if p.grad is None:
            p.grad = torch.empty_like(p)
        with torch.no_grad():
            p.grad.copy_(gradient)
        twin.grad = gradient.to("cpu", twin.dtype)


def train(optimizer, oracle, params, twins, steps=4, first=1, without=()):
    for step in range(first, first + steps):
        give(params, twins, step, without)
        optimizer.step()
        oracle.step()


def flat_tensors(optimizer):
    groups = [slices for slices in optimizer._groups if slices is not None]
    states = [t for slices in groups for flats in slices.states.values() for t in flats]
    return [t for slices in groups for t in (*slices.params,)] + states


def assert_gaps_are_zero(optimizer):
    for slices in filter(None, optimizer._groups):
        for number, layout in enumerate(slices.layouts):
            gaps = layout.mask(F32, slices.device) == 0
            for flat in (slices.params[number], *(flats[number] for flats in slices.states.values())):
                assert flat[gaps].eq(0).all()


# ---- formulas --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, first, second", CASES, ids=lambda v: v if isinstance(v, str) else str(v))
def test_formula(variant, name, first, second):
    optimizer, params, twins = start(name, variant.device, (first, second))
    train(optimizer, Two(name, twins, 3, (first, second)), params, twins)
    training.assert_trained(params, twins, steps=4, arithmetic=64)
    assert_gaps_are_zero(optimizer)


@pytest.mark.parametrize("name, first, second", CASES, ids=str)
def test_formula_where_no_binding_fits(monkeypatch, name, first, second):
    """Plans then run the reference by themselves, as on a device that no kernel is for."""
    monkeypatch.setattr(_combined_optimizer, "make_plan", reference_plan)
    optimizer, params, twins = start(name, "cpu", (first, second))
    train(optimizer, Two(name, twins, 3, (first, second)), params, twins)
    training.assert_trained(params, twins, steps=4, arithmetic=64)


def reference_plan(names, written, lists, owners, watched=(), states=None):
    bindings.load()
    return _plan.ReferencePlan(names, lists, owners, watched, states)


@pytest.mark.parametrize("name", NAMES)
def test_one_launch_a_group(variant, name):
    optimizer, params, twins = start(name, variant.device, ({}, {}))
    give(params, twins, 1)
    optimizer.step()
    if variant.simt:
        expected = {"AdamP": 0, "Lamb": 4}.get(name, 2)
        assert (
            sum(n for kernel, n in variant.kernels.items() if kernel != "multi_tensor_table_write")
            == expected
        )


TORCHS = [(name, options) for name, *options in CASES if name not in OWN]


@pytest.mark.parametrize("name, options", TORCHS, ids=str)
def test_twenty_steps_are_torchs_in_float32(name, options):
    """The single-tensor form, but for fused multiply-adds: a rounding or two a step of values up to a few units."""
    optimizer, params, _ = start(name, "cpu", options)
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    train(optimizer, Two(name, twins, 3, options), params, twins, steps=20)
    for p, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(p, twin, rtol=2e-6, atol=4e-6)


def test_plain_lamb_is_the_papers():
    for options in (dict(lr=0.1), dict(lr=0.1, weight_decay=0.1), dict(lr=0.1, adam=True)):
        params = training.parameters(F64, "cpu")
        twins = training.twins_of(params)
        optimizer = Lamb(params, betas=BETAS, **options)
        training.train(optimizer, training.Oracle(twins, lamb(betas=BETAS, **options)), params, twins)
        training.assert_trained(params, twins)
    state = optimizer.state[params[0]]
    assert state["step"] == 3 and set(state) == {
        "step", "exp_avg", "exp_avg_sq", "weight_norm", "adam_norm", "trust_ratio",
    }  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [dict(adam=True), dict(use_global_grad_norm=True), dict(adam=True, use_global_grad_norm=True)],
    ids=str,
)
def test_options_of_lamb(variant, options):
    params = training.parameters(F32, variant.device, SHAPES)
    twins = training.twins_of(params)
    optimizer = kind("Lamb")(params, lr=0.1, weight_decay=0.1, **options)
    runs.initialize(nn.ParameterList(params), optimizer, opt_level="O1", loss_scale=1.0)
    oracle = training.Oracle(
        twins, lamb(0.1, (0.9, 0.999), weight_decay=0.1, adam=options.get("adam", False))
    )
    for step in (1, 2, 3):
        give(params, twins, step)
        if "use_global_grad_norm" in options:
            norm = lists.norm([t.grad for t in twins])
            for t in twins:
                t.grad /= max(norm, 1.0)
        optimizer.step()
        oracle.step()
    training.assert_trained(params, twins, arithmetic=64)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", NAMES)
def test_autograd_sees_a_step(variant, name, level):
    """A graph from before it is refused, as after a step of torch's: its values are gone."""
    optimizer, params, twins = start(name, variant.device, ({}, {}), level)
    give(params, twins, 1)
    optimizer.step()
    of_states = [t for p in params for t in optimizer.state[p].values()]
    versions = [t._version for t in of_states]
    loss = sum(p.square().sum() for p in params)
    give(params, twins, 2)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert all(t._version > before for t, before in zip(of_states, versions, strict=True))


def test_weight_norms_of_lamb_are_clamped(variant):
    params = [nn.Parameter(20 * t) for t in lists.random(F32, variant.device, ((100,),))]
    twins = training.twins_of(params)
    optimizer = kind("Lamb")(params, lr=0.1, betas=BETAS)
    runs.initialize(nn.ParameterList(params), optimizer, opt_level="O1", loss_scale=1.0)
    train(optimizer, training.Oracle(twins, lamb(0.1)), params, twins)
    training.assert_trained(params, twins, arithmetic=64)


@pytest.mark.parametrize("schedule", ["warmup_linear", "warmup_cosine", "warmup_constant", "warmup_poly"])
@pytest.mark.parametrize("warmup", [-1, 0.3])
def test_schedules_of_bert_adam(variant, schedule, warmup):
    def rate(step):
        x = step / 5
        if x < warmup:
            return x / warmup
        return {
            "warmup_linear": max((x - 1) / (warmup - 1), 0),
            "warmup_cosine": 0.5 * (1 + math.cos(math.pi * x)),
            "warmup_constant": 1.0,
            "warmup_poly": max(1 - x, 0) ** 0.5,
        }[schedule]

    params = training.parameters(F32, variant.device, SHAPES)
    twins = training.twins_of(params)
    optimizer = kind("BertAdam")(params, lr=0.1, warmup=warmup, t_total=5, schedule=schedule)
    assert optimizer.get_lr() == [0]
    runs.initialize(nn.ParameterList(params), optimizer, opt_level="O1", loss_scale=1.0)
    train(optimizer, training.Oracle(twins, bert_adam(0.1, rate=rate)), params, twins, steps=6)
    training.assert_trained(params, twins, steps=6, arithmetic=64)
    assert optimizer.get_lr() == pytest.approx([0.1 * rate(6)] * len(params), abs=1e-7)


def test_bert_adam_clips_by_the_norm_of_all_groups(variant):
    params = training.parameters(F32, variant.device, SHAPES)
    twins = training.twins_of(params)
    groups = [dict(params=params[:3]), dict(params=params[3:], max_grad_norm=-1)]
    optimizer = kind("BertAdam")(groups, lr=0.1, max_grad_norm=2.0)
    runs.initialize(nn.ParameterList(params), optimizer, opt_level="O1", loss_scale=1.0)
    oracle = training.Oracle(twins, bert_adam(0.1))
    for step in (1, 2):
        give(params, twins, step)
        norm = lists.norm([t.grad for t in twins])
        for t in twins[:3]:
            t.grad /= norm
        optimizer.step()
        oracle.step()
    training.assert_trained(params, twins, steps=2, arithmetic=64)


def test_adamps_long_weights():
    """Of more elements than half precision can count."""
    options = dict(lr=0.1, betas=BETAS, weight_decay=0.1, delta=3.0)
    optimizer, params, twins = start("AdamP", "cpu", [options] * 2, shapes=((1, 70_000), (2, 40_000)))
    train(optimizer, Two("AdamP", twins, 1, [options] * 2), params, twins, steps=2)
    training.assert_trained(params, twins, steps=2, arithmetic=64)


def test_memory_orders(variant):
    """channels_last and transposed parameters, ones with gaps; AdamP's rows are those of the shape all the same."""
    for name in ("Adam", "AdamP"):
        runs.forget()
        tensors = [
            *lists.channels_last(F32, variant.device),
            lists.random(F32, variant.device, ((6, 10),))[0][:, ::3],
        ]
        params = [nn.Parameter(t) for t in tensors]
        options = [dict(lr=0.1, weight_decay=0.1, **({"delta": 3.0} if name == "AdamP" else {}))] * 2
        optimizer, params, twins = start(name, variant.device, options, params=params)
        oracle = Two(name, twins, len(params) // 2, [{"betas": (0.9, 0.999), **own} for own in options])
        train(optimizer, oracle, params, twins, steps=2)
        training.assert_trained(params, twins, steps=2, arithmetic=64)
        assert params[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_as_learning_rate(variant, name):
    trained = []
    for lr in (0.1, torch.tensor(0.1, device=variant.device, dtype=F32)):
        runs.forget()
        optimizer, params, twins = start(name, variant.device, (dict(lr=lr), dict(lr=lr)))
        for step in (1, 2):
            give(params, twins, step)
            optimizer.step()
        trained.append(params)
    for a, b in zip(*trained, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


# ---- amp -------------------------------------------------------------------------------------------------


def factory(name):
    return lambda params: kind(name)(params, **USUAL[name])


@pytest.mark.parametrize("combine_grad", [None, True])
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop"])
def test_curves_are_torchs(name, level, combine_grad):
    """With or without combine_grad, which a fused optimizer brings along; accumulated gradients among them."""
    curves = []
    for make in (getattr(torch.optim, name), kind(name)):
        runs.forget()
        model = runs.network()
        options = {**USUAL[name], "lr": 0.01}
        model, optimizer = runs.initialize(
            model, make(model.parameters(), **options), opt_level=level, combine_grad=combine_grad
        )
        losses = runs.train(model, optimizer, 6)
        for step in range(6, 12):
            if step % 2 == 0:
                optimizer.zero_grad()
            loss = runs.loss_of(model, step)
            runs.backward(loss, optimizer)
            if step % 2:
                optimizer.step()
            losses.append(loss.item())
        curves.append(losses)
    assert curves[0] == pytest.approx(curves[1], abs=2e-2 if level in ("O4", "O5") else 2e-3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_changes_nothing(name, level):
    model = runs.network()
    model, optimizer = runs.initialize(
        model,
        factory(name)(model.parameters()),
        opt_level=level,
        loss_scale="dynamic",
        dynamic_init_scale=256.0,
    )
    runs.overflow(model, optimizer)
    before = runs.values(model)
    optimizer.step()
    assert runs.equal(runs.values(model), before) and runs.scaler().loss_scale() == 128.0
    runs.train(model, optimizer, 1)
    runs.overflow(model, optimizer)
    before = [runs.values(model), [t.clone() for t in flat_tensors(optimizer)]]
    optimizer.step()
    assert runs.equal(runs.values(model), before[0]) and runs.equal(flat_tensors(optimizer), before[1])
    assert runs.scaler().loss_scale() == 64.0
    if optimizer.counts:
        assert int(optimizer.state[next(iter(optimizer.state))]["step"]) == 1


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_is_combined(level):
    model = runs.network()
    model, optimizer = runs.initialize(model, factory("Adam")(model.parameters()), opt_level=level)
    assert optimizer.get_model_combined_params() == optimizer.get_optimizer_combined_params() == []
    runs.train(model, optimizer, 1)
    params = list(amp.master_params(optimizer))
    flats = optimizer.get_optimizer_combined_params()
    assert [f.dtype for f in flats] == [F32] * (2 if level == "O2" else 1)
    assert sum(f.double().sum() for f in flats) == pytest.approx(sum(p.double().sum().item() for p in params))
    assert [f is None for f in optimizer.get_model_combined_params()] == (
        [True, False] if level == "O2" else [False]
    )
    before = [p.detach().clone() for p in params]
    for flat in flats:
        flat.add_(1.0)
    assert all(torch.equal(p, b + 1.0) for p, b in zip(params, before, strict=True))
    for p in params:
        assert optimizer.state[p]["exp_avg"].shape == p.shape and int(optimizer.state[p]["step"]) == 1


def test_a_closure():
    for level in ("O1", "O2"):
        runs.forget()
        model = runs.network()
        model, optimizer = runs.initialize(model, factory("Adam")(model.parameters()), opt_level=level)
        losses = []

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = runs.loss_of(model)
            runs.backward(loss, optimizer)
            return loss

        for _ in range(12):
            losses.append(optimizer.step(closure).item())
        assert losses[-1] < losses[0]


# ---- states and groups -----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", NAMES)
def test_resume_is_bit_exact(name, level):
    def fresh():
        runs.forget()
        model = runs.network()
        return runs.initialize(model, factory(name)(model.parameters()), opt_level=level)

    model, optimizer = fresh()
    runs.train(model, optimizer, 3)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), amp.state_dict()])
    expected = runs.train(model, optimizer, 3, first=3)
    weights, state = runs.values(model), optimizer.state_dict()
    again, other = fresh()
    runs.train(again, other, 1)  # buffers that are there when the checkpoint comes
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    amp.load_state_dict(saved[2])
    assert runs.train(again, other, 3, first=3) == expected
    assert runs.equal(runs.values(again), weights)
    for key, values in state["state"].items():
        for what, value in values.items():
            assert torch.equal(value, other.state_dict()["state"][key][what])


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adadelta", "RMSprop"])
def test_continues_torchs_checkpoint(name):
    params = training.parameters(F32, "cpu", SHAPES)
    twins = training.twins_of(params)
    oracle = getattr(torch.optim, name)(twins, **USUAL[name])
    for step in (1, 2):
        give(params, twins, step)
        float32_on_cpu()(oracle.step)()  # torch counts in tensors of the default device
    with torch.no_grad():
        for p, twin in zip(params, twins, strict=True):
            p.copy_(twin)
    optimizer = kind(name)(params, **USUAL[name])
    runs.initialize(nn.ParameterList(params), optimizer, opt_level="O1", loss_scale=1.0)
    optimizer.load_state_dict(oracle.state_dict())
    train(optimizer, oracle, params, twins, steps=2, first=3)
    training.assert_trained(params, twins, steps=2, arithmetic=64)


def test_continues_a_checkpoint_from_before_options():
    """Groups without "centered" and "momentum", as torch once saved them: without both."""
    params = training.parameters(F32, "cpu", SHAPES)
    twins = training.twins_of(params)
    oracle = torch.optim.RMSprop(twins, lr=0.1)
    saved = oracle.state_dict()
    for option in ("centered", "momentum"):
        del saved["param_groups"][0][option]
    optimizer = kind("RMSprop")(params, lr=99.0, momentum=0.9, centered=True)
    runs.initialize(nn.ParameterList(params), optimizer, opt_level="O1", loss_scale=1.0)
    optimizer.load_state_dict(saved)
    train(optimizer, oracle, params, twins)
    training.assert_trained(params, twins, steps=4, arithmetic=64)
    assert set(optimizer.state[params[0]]) == {"square_avg", "step"}


def test_a_loaded_buffers_negative_zeros_are_values():
    """In a buffer that holds something; one of -0.0 alone says that no step was taken."""
    params = training.parameters(F32, "cpu", ((3,), (3,)))
    optimizer = kind("SGD")(params, lr=0.0, momentum=0.9, dampening=0.5)
    runs.initialize(nn.ParameterList(params), optimizer, opt_level="O1", loss_scale=1.0)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for state, first in zip(saved["state"].values(), (1.0, -0.0), strict=True):
        state["momentum_buffer"] = torch.tensor([first, -0.0, -0.0], dtype=F32, device="cpu")
    optimizer.load_state_dict(saved)
    optimizer.step()
    for p, expected in zip(params, ([1.4, 0.5, 0.5], [1.0, 1.0, 1.0]), strict=True):
        expected = torch.tensor(expected, dtype=F64, device="cpu")
        lists.assert_near([optimizer.state[p]["momentum_buffer"]], [expected])


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_without_gradient_is_left_alone_until_it_has_one(variant, name):
    options = (USUAL[name], USUAL[name])
    optimizer, params, _ = start(name, variant.device, options)
    twins = training.twins_of(params)
    before = params[2].detach().clone()
    for step in (1, 2):
        give(params, twins, step, without=(2,))
        optimizer.step()
        assert torch.equal(params[2], before) and "exp_avg" not in optimizer.state.get(params[2], {})
    give(params, twins, 3)
    optimizer.step()
    give(params, twins, 4)
    optimizer.step()
    assert not torch.equal(params[2], before)
    assert_gaps_are_zero(optimizer)


def test_an_added_group(variant):
    optimizer, params, twins = start("Adam", variant.device, (dict(lr=0.1), dict(lr=0.1)))
    oracle = Two("Adam", twins, 3, (dict(lr=0.1), dict(lr=0.1)))
    train(optimizer, oracle, params, twins, steps=2)
    more = training.parameters(F32, variant.device, ((5, 5), (3,)), seed=9)
    others = training.twins_of(more)
    optimizer.add_param_group(dict(params=more, lr=0.05))
    oracle.oracles.append(torch.optim.Adam(others, lr=0.05))
    params, twins = [*params, *more], [*twins, *others]
    train(optimizer, oracle, params, twins, steps=2, first=3)
    training.assert_trained(params, twins, steps=4, arithmetic=64)
    assert [int(optimizer.state[p]["step"]) for p in (params[0], more[0])] == [4, 2]


def test_empty_groups_and_no_gradients(variant):
    p = training.parameters(F32, variant.device, ((5,),))
    optimizer = kind("Adam")([dict(params=[]), dict(params=p)], lr=0.1)
    runs.initialize(nn.ParameterList(p), optimizer, opt_level="O1", loss_scale=1.0)
    before = p[0].detach().clone()
    optimizer.step()
    assert torch.equal(p[0], before)
    p[0].grad = torch.ones_like(p[0])
    optimizer.step()
    assert not torch.equal(p[0], before)


def test_foreign_tensors(variant):
    """Tensors that are no model's are combined like any."""
    model = nn.ParameterList(training.parameters(F32, variant.device, ((5,),)))
    foreign = training.parameters(F32, variant.device, ((3, 3),), seed=4)
    optimizer = kind("SGD")([dict(params=model.parameters()), dict(params=foreign)], lr=0.5)
    runs.initialize(model, optimizer, opt_level="O1", loss_scale=1.0)
    params = [*model, *foreign]
    before = lists.clones([p.detach() for p in params])
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    for p, b in zip(params, before, strict=True):
        torch.testing.assert_close(p.detach(), b - 0.5)


@pytest.mark.parametrize("check", [None, True])
def test_parameters_whose_data_was_replaced(check):
    """Seen at the next step without any option; reported, and trained from the new values."""
    options = (USUAL["SGD"], USUAL["SGD"])
    optimizer, params, twins = start("SGD", "cpu", options, check_combined_tensors=check)
    oracle = Two("SGD", twins, 3, options)
    train(optimizer, oracle, params, twins, steps=2)
    params[2].data = torch.ones_like(params[2])
    twins[2].data = torch.ones_like(twins[2])
    with pytest.warns(
        amp.AmpWarning, match=r"at step\(\), the parameter of a parameter of shape \(33, 5\) in group 0"
    ):
        train(optimizer, oracle, params, twins, steps=1, first=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(optimizer, oracle, params, twins, steps=1, first=4)
    training.assert_trained(params, twins, steps=4, arithmetic=64)
    params[2].data = torch.ones(33, 5, dtype=torch.float16, device="cpu")
    with pytest.raises(RuntimeError, match="a combined parameter was torch.float32"):
        optimizer.step()


def test_replaced_states_are_seen_with_check():
    optimizer, params, twins = start("Adam", "cpu", (dict(lr=0.1), dict(lr=0.1)), check_combined_tensors=True)
    give(params, twins, 1)
    optimizer.step()
    optimizer.state[params[2]]["exp_avg"] = torch.full((33, 5), 1e3, dtype=F32, device="cpu")
    give(params, twins, 2)
    optimizer.step()
    assert optimizer.state[params[2]]["exp_avg"].min() > 800


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"]
)
def test_copies_keep_their_options(again):
    copied = again(kind("Lamb")(training.parameters(F32, "cpu"), adam=True, use_global_grad_norm=True))
    assert copied.adam and copied.use_global_grad_norm
    assert again(Lamb(training.parameters(F32, "cpu"), adam=True)).adam


# ---- names, and what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_ascends_names(name):
    npu = getattr(apex.optimizers, f"NpuFused{name}")
    assert issubclass(npu, kind(name)) and npu.is_npu_fused_optimizer
    optimizer = npu(training.parameters(F32, "cpu"), **USUAL[name])
    with pytest.raises(RuntimeError, match=f"apex.optimizers.NpuFused{name} should be used with AMP."):
        optimizer.step()
    model = runs.network()
    model, optimizer = runs.initialize(model, npu(model.parameters(), **USUAL[name]), opt_level="O2")
    before = runs.values(model)
    runs.train(model, optimizer, 2)
    assert not runs.equal(before, runs.values(model))


@pytest.mark.parametrize("level", ["O0", "O3"])
def test_levels_without_combined_tensors(level):
    model = runs.network()
    with pytest.raises(
        RuntimeError, match=f"CombinedAdam works on combined tensors, which {level} does not make"
    ):
        runs.initialize(model, factory("Adam")(model.parameters()), opt_level=level)


def test_o2_without_master_weights():
    model = runs.network()
    with pytest.raises(RuntimeError, match="need master weights"):
        runs.initialize(model, factory("Adam")(model.parameters()), opt_level="O2", master_weights=False)


@pytest.mark.parametrize("name", NAMES)
def test_sparse_gradients(name):
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True, dtype=F32, device="cpu"))
    model, optimizer = runs.initialize(model, factory(name)(model.parameters()), opt_level="O1")
    with pytest.raises(RuntimeError, match=f"Combined{name}.* has a sparse gradient(.|\n)*SparseAdam"):
        runs.backward(model(torch.tensor([1], device="cpu", dtype=torch.int64)).sum(), optimizer)


BAD = [
    *((name, dict(lr=lr)) for name in NAMES for lr in (-1.0, float("nan"))),
    *((name, dict(lr=0.1, eps=-1.0)) for name in NAMES if name not in ("SGD", "BertAdam")),
    *((name, dict(lr=0.1, weight_decay=-1.0)) for name in NAMES),
    *((name, dict(betas=(1.0, 0.9))) for name in ("Adam", "AdamW", "AdamP", "Lamb")),
    *((name, dict(betas=(0.9, -0.1))) for name in ("Adam", "AdamW", "AdamP", "Lamb")),
    ("SGD", dict(lr=0.1, momentum=-1.0)),
    ("SGD", dict(lr=0.1, nesterov=True)),
    ("SGD", dict(lr=0.1, nesterov=True, momentum=0.9, dampening=0.1)),
    ("SGD", dict()),
    ("BertAdam", dict()),
    ("BertAdam", dict(lr=0.1, schedule="warmup")),
    ("BertAdam", dict(lr=0.1, warmup=1.0)),
    ("BertAdam", dict(lr=0.1, warmup=-0.5)),
    ("BertAdam", dict(lr=0.1, b1=1.0)),
    ("BertAdam", dict(lr=0.1, e=-1.0)),
    ("Adadelta", dict(rho=1.0)),
    ("RMSprop", dict(alpha=-0.1)),
    ("RMSprop", dict(momentum=-0.1)),
]


@pytest.mark.parametrize("name", NAMES)
def test_unknown_options(name):
    with pytest.raises(TypeError):
        kind(name)([nn.Parameter(torch.ones(1, dtype=F32, device="cpu"))], lr=0.1, temperature=1.0)


@pytest.mark.parametrize("name, options", BAD, ids=str)
def test_bad_options(name, options):
    with pytest.raises(ValueError):
        kind(name)([nn.Parameter(torch.ones(1, dtype=F32, device="cpu"))], **options)
