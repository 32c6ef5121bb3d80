"""FusedNovoGrad against its formula in float64, on everything that can serve it."""

from __future__ import annotations

import copy
import pickle

import lists
import pytest
import torch
import training
from lists import BF16, F16, F32, F64, scalar

from apex.optimizers import FusedNovoGrad

DTYPES = (F32, F16, BF16, F64)
USUAL = dict(lr=0.1, betas=(0.9, 0.98), weight_decay=0.1)
OPTIONS = [
    {},
    dict(reg_inside_moment=True),
    dict(norm_type=0),
    dict(init_zero=True),
    dict(init_zero=True, norm_type=0, reg_inside_moment=True, bias_correction=False),
    dict(grad_averaging=False, bias_correction=False),
]


def novograd(twins, **options):
    """Public apex's formula; the group's step is counted over all parameters."""
    o = dict(
        lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
        reg_inside_moment=False, grad_averaging=True, norm_type=2, init_zero=False,
    ) | options  # fmt: skip
    beta1, beta2 = o["betas"]

    def update(state, p, g):
        if not g.numel():
            return p
        state["step"] = oracle.steps
        norm = g.abs().max() if o["norm_type"] == 0 else g.norm()
        old = state.get("norm", 0.0 if o["init_zero"] else norm)
        if o["norm_type"] == 0:
            state["norm"] = beta2 * old + (1 - beta2) * norm
        else:
            state["norm"] = (beta2 * old**2 + (1 - beta2) * norm**2) ** 0.5
        first = 1 - beta1**oracle.steps if o["bias_correction"] else 1
        second = (1 - beta2**oracle.steps) ** 0.5 if o["bias_correction"] else 1
        divisor = state["norm"] / second + o["eps"]
        if o["reg_inside_moment"]:
            g = g / divisor + o["weight_decay"] * p
        state["average"] = beta1 * state.get("average", 0) + (1 - beta1 if o["grad_averaging"] else 1) * g
        step = state["average"] / first
        if not o["reg_inside_moment"]:
            step = step / divisor + o["weight_decay"] * p
        return p - oracle.lr * step

    class Counted(training.Oracle):
        steps, lr = 0, o["lr"]

        def step(self):
            self.steps += 1
            super().step()

    oracle = Counted(twins, update)
    return oracle


def _pair(device, dtype=F32, shapes=training.SHAPES, capturable=False, **options):
    """FusedNovoGrad, its formula, their parameters."""
    params = training.parameters(dtype, device, shapes)
    twins = training.twins_of(params)
    options = USUAL | options
    return FusedNovoGrad(params, capturable=capturable, **options), novograd(twins, **options), params, twins


def assert_trained(params, twins, steps=3):
    """Norms are float32, also of float64 parameters."""
    for p, twin in zip(params, twins, strict=True):
        extra = lists.ROUNDING[F32] / lists.ROUNDING[F64] if p.dtype == F64 else 1
        training.assert_trained([p], [twin], steps, arithmetic=8 * extra)


@pytest.mark.parametrize("capturable", [False, True], ids=["", "capturable"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_the_formula(variant, dtype, options, capturable):
    fused, oracle, params, twins = _pair(variant.device, dtype, capturable=capturable, **options)
    training.train(fused, oracle, params, twins)
    assert_trained(params, twins)
    assert int(fused.param_groups[0]["step"]) == 3


def test_large_tensors(variant):
    fused, oracle, params, twins = _pair(variant.device, BF16, lists.SHAPES)
    training.train(fused, oracle, params, twins, steps=2)
    assert_trained(params, twins, steps=2)


@pytest.mark.parametrize("init_zero", [False, True])
def test_gradients_that_come_and_go(variant, init_zero):
    """A parameter's norm begins with its own first gradient, whenever that comes, and waits for the next."""
    fused, oracle, params, twins = _pair(variant.device, init_zero=init_zero)
    for step, without in enumerate([(0, 3), (3,), (2,), ()], start=1):
        before = lists.clones([params[i] for i in without])
        training.give_gradients(params, twins, step, without=without)
        fused.step()
        oracle.step()
        lists.assert_same_bits([params[i] for i in without], before)
    assert_trained(params, twins, steps=4)


def test_memory_orders(variant):
    params = [torch.nn.Parameter(t) for t in lists.channels_last(F32, variant.device)]
    params += [torch.nn.Parameter(t) for t in lists.misaligned(lists.random(F32, variant.device, ((5, 9),)))]
    twins = training.twins_of(params)
    training.train(FusedNovoGrad(params, **USUAL), novograd(twins, **USUAL), params, twins)
    assert_trained(params, twins)


def test_a_parameter_with_gaps(variant):
    """No kernel takes it; the reference does."""
    variant.mixed = True
    params = [torch.nn.Parameter(torch.randn(6, 10, device=variant.device, dtype=F32)[:, ::3])]
    twins = training.twins_of(params)
    training.train(FusedNovoGrad(params, **USUAL), novograd(twins, **USUAL), params, twins)
    assert_trained(params, twins)


def test_two_launches_a_dtype(variant):
    params = [p for dtype in DTYPES * 2 for p in training.parameters(dtype, variant.device)]
    twins = training.twins_of(params)
    training.train(FusedNovoGrad(params, **USUAL), novograd(twins, **USUAL), params, twins, without=(3, 8))
    assert_trained(params, twins)
    assert training.launches(variant, "multi_tensor_novograd") in (None, 3 * 2 * len(DTYPES))


def test_groups(variant):
    params = training.parameters(F32, variant.device)
    twins = training.twins_of(params)
    fused = FusedNovoGrad([dict(params=params[:3], weight_decay=0.3), dict(params=params[3:])], **USUAL)
    oracles = [novograd(twins[:3], **(USUAL | dict(weight_decay=0.3))), novograd(twins[3:], **USUAL)]
    for step in (1, 2, 3):
        training.give_gradients(params, twins, step)
        fused.step()
        for oracle in oracles:
            oracle.step()
    assert_trained(params, twins)


def test_nothing_to_do(variant):
    fused = FusedNovoGrad(training.parameters(F32, variant.device))
    fused.step()
    FusedNovoGrad([dict(params=[])]).step()
    assert not training.launches(variant, "multi_tensor_novograd")


@pytest.mark.parametrize("capturable", [False, True], ids=["", "capturable"])
def test_steps_without_elements_count(variant, capturable):
    empty = training.parameters(F32, variant.device, ((0,), (3, 0)))
    fused = FusedNovoGrad(empty, capturable=capturable)
    for p in empty:
        p.grad = torch.zeros_like(p)
    fused.step()
    fused.step()
    assert int(fused.param_groups[0]["step"]) == 2


# ---- states ----------------------------------------------------------------------------------------------


def test_norms_as_public_apex_keeps_them(variant):
    """A float32 tensor for half precision and one for the others; averages in full precision."""
    halves = training.parameters(F16, variant.device)
    full = training.parameters(F32, variant.device)
    params = [p for pair in zip(full, halves, strict=True) for p in pair]
    fused = FusedNovoGrad(params, lr=0.0)
    training.give_gradients(params, training.twins_of(params), 1, without=(4,))
    fused.step()
    norms = fused.param_groups[0]["exp_avg_sq"]
    for found, some in zip(norms, (halves, full), strict=True):
        expected = [p.grad.double().norm().cpu() for p in some if p.grad is not None]
        assert found.dtype == F32 and found.device == variant.device
        filled = [i for i, p in enumerate(q for q in some if q.grad is not None) if p.numel()]
        lists.assert_near([found[filled]], [torch.stack(expected)[filled]], arithmetic=8)
    assert all(m.dtype == F32 for m in training.state_values(fused, "exp_avg"))


def _continue(first, second, params, again, steps):
    with torch.no_grad():
        for p, q in zip(again, params, strict=True):
            p.copy_(q)
    twins = training.twins_of(params)
    for step in steps:
        training.give_gradients(params, twins, step)
        training.give_gradients(again, twins, step)
        first.step()
        second.step()
    lists.assert_same_bits(again, params)


@pytest.mark.parametrize("capturable", [False, True], ids=["", "capturable"])
def test_state_dict_round_trip(variant, capturable):
    """The norms follow their parameters, also those that join after the checkpoint."""
    params = training.parameters(BF16, variant.device) + training.parameters(F32, variant.device)
    again = [torch.nn.Parameter(p.detach().clone()) for p in params]
    first = FusedNovoGrad(params, capturable=capturable, **USUAL)
    training.train(first, training.Oracle([], None), params, training.twins_of(params), 2, without=(3, 7))
    second = FusedNovoGrad(again, lr=99.0, capturable=capturable)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    _continue(first, second, params, again, (3, 4))
    assert [n.numel() for n in second.param_groups[0]["exp_avg_sq"]] == [5, 5]


def test_continues_public_apexs_checkpoint(variant):
    """Its averages have the parameter's dtype, its norms lie on the device that saved them."""
    params = training.parameters(F16, variant.device, ((5,), (3,)))
    fused = FusedNovoGrad(params, lr=0.0, betas=(0.5, 0.5), bias_correction=False)
    checkpoint = fused.state_dict()
    checkpoint["state"] = {
        i: dict(exp_avg=torch.full(p.shape, 3.0, dtype=F16, device="cpu")) for i, p in enumerate(params)
    }
    norms = [torch.tensor([2.0, 4.0], dtype=F32, device="cpu"), torch.empty(0, dtype=F32, device="cpu")]
    checkpoint["param_groups"][0] |= dict(step=7, exp_avg_sq=norms)
    fused.load_state_dict(checkpoint)
    for p in params:
        p.grad = torch.zeros_like(p)
    fused.step()
    assert fused.param_groups[0]["step"] == 8
    lists.assert_near(
        fused.param_groups[0]["exp_avg_sq"],
        [
            torch.tensor([2.0, 4.0], dtype=F64, device="cpu") * 0.5**0.5,
            torch.empty(0, dtype=F32, device="cpu").double(),
        ],
    )
    assert all(m.dtype == F32 and m.eq(1.5).all() for m in training.state_values(fused, "exp_avg"))


def test_a_checkpoint_of_other_parameters_is_refused(variant):
    fused, oracle, params, twins = _pair(variant.device)
    training.train(fused, oracle, params, twins, steps=1)
    checkpoint = fused.state_dict()
    checkpoint["param_groups"][0]["exp_avg_sq"] = [
        torch.ones(2, dtype=F32, device="cpu"),
        torch.ones(3, dtype=F32, device="cpu"),
    ]
    with pytest.raises(ValueError, match=r"holds \[2, 3\] norms for \[0, 5\] parameters"):
        fused.load_state_dict(checkpoint)


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"]
)
def test_copies_go_on_alike(variant, again):
    fused, oracle, params, twins = _pair(variant.device, F32, reg_inside_moment=True)
    training.train(fused, oracle, params, twins, steps=2)
    other = again(fused)
    assert other.moment_mode == 0
    _continue(fused, other, params, other.param_groups[0]["params"], (3, 4))


# ---- scalars on the device, loss scaling -----------------------------------------------------------------


@pytest.mark.parametrize("capturable", [False, True], ids=["", "capturable"])
def test_a_tensor_as_learning_rate(variant, capturable):
    lr = torch.tensor(0.1, device=variant.device, dtype=F32)
    fused, oracle, params, twins = _pair(variant.device, lr=lr, capturable=capturable)
    oracle.lr = 0.1
    training.train(fused, oracle, params, twins)
    fused.param_groups[0]["lr"].fill_(0.5)
    oracle.lr = 0.5
    training.train(fused, oracle, params, twins)
    assert_trained(params, twins, steps=6)


def test_under_a_grad_scaler(variant):
    """Unscaled on the device; a step with an inf is skipped there, and not counted."""
    fused, oracle, params, twins = _pair(variant.device, capturable=True)
    scaler = torch.amp.GradScaler(variant.device.type, init_scale=1024.0, growth_interval=1000)
    scaler.scale(torch.zeros((), device=variant.device, dtype=F32))  # makes the scale
    for step in (1, 2, 3):
        training.give_gradients(params, twins, step, scale=scaler.get_scale())
        if step == 1:
            params[-1].grad[-1] = float("inf")
        else:
            oracle.step()
        scaler.step(fused)
        scaler.update()
    assert int(fused.param_groups[0]["step"]) == 2
    assert_trained(params, twins)


@pytest.mark.gpu
def test_a_captured_step(variant):
    """Replays take new gradients, a new learning rate and a raised flag, and count steps."""
    fused, oracle, params, twins = _pair(variant.device, capturable=True)

    training.replay(fused, oracle, params, twins, fused.param_groups[0]["lr"])
    assert_trained(params, twins, steps=4)
    assert int(fused.param_groups[0]["step"]) == 3


# ---- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error, words, options",
    [
        (RuntimeError, "AMSGrad", dict(amsgrad=True)),
        (RuntimeError, "norm_type", dict(norm_type=1)),
        (ValueError, "lr must not be negative", dict(lr=-1.0)),
        (ValueError, "betas must lie", dict(betas=(0.9, 1.0))),
        (ValueError, "eps must not be negative", dict(eps=float("nan"))),
        (ValueError, "weight_decay must not be negative", dict(weight_decay=-1.0)),
    ],
)
def test_bad_options(error, words, options):
    with pytest.raises(error, match=words):
        FusedNovoGrad([torch.nn.Parameter(torch.ones(1, dtype=F32, device="cpu"))], **options)


def test_bad_parameters(variant):
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64, device=variant.device))
    p.grad = torch.ones_like(p)
    with pytest.raises(TypeError, match="parameter 0 of group 0 is torch.complex64"):
        FusedNovoGrad([p]).step()
    p = torch.nn.Parameter(torch.ones(3, 2, device=variant.device, dtype=F32))
    p.grad = torch.ones_like(p).to_sparse()
    with pytest.raises(RuntimeError, match="sparse gradient"):
        FusedNovoGrad([p]).step()


def test_unscales_half_gradients(variant):
    fused, oracle, params, twins = _pair(variant.device, F16, capturable=True)
    fused.grad_scale, fused.found_inf = scalar(4.0, variant.device), scalar(0.0, variant.device)
    training.train(fused, oracle, params, twins, scale=4.0)
    assert_trained(params, twins)
