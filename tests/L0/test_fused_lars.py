"""FusedLARS against its formula in float64, on everything that can serve it."""

from __future__ import annotations

import copy
import pickle

import lists
import pytest
import torch
import training
from lists import BF16, F16, F32, F64, scalar

from apex.optimizers import FusedLARS

DTYPES = (F32, F16, BF16, F64)
USUAL = dict(lr=1.0, momentum=0.9, weight_decay=0.1, trust_coefficient=0.1, eps=1e-3)
OPTIONS = [dict(), dict(nesterov=True), dict(momentum=0.0), dict(weight_decay=0.0, eps=0.0)]


def lars(
    twins, lr, momentum=0.0, weight_decay=0.0, trust_coefficient=0.001, eps=0.0, nesterov=False, skip=False
):
    """Public apex's formula."""

    def update(state, p, g):
        size, g_norm, p_norm = oracle.lr, float(g.norm()), float(p.norm())
        if not skip and g_norm > 0 and p_norm > 0:
            size *= trust_coefficient * p_norm / (g_norm + weight_decay * p_norm + eps)
        step = size * (g + weight_decay * p)
        state["buffer"] = momentum * state.get("buffer", 0) - step
        return p + (momentum * state["buffer"] - step if nesterov else state["buffer"])

    oracle = training.Oracle(twins, update)
    oracle.lr = lr
    return oracle


def _pair(device, dtype=F32, shapes=training.SHAPES, **options):
    """FusedLARS, its formula, their parameters."""
    params = training.parameters(dtype, device, shapes)
    twins = training.twins_of(params)
    options = USUAL | options
    return FusedLARS(params, **options), lars(twins, **options), params, twins


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_the_formula(variant, dtype, options):
    fused, oracle, params, twins = _pair(variant.device, dtype, **options)
    training.train(fused, oracle, params, twins)
    training.assert_trained(params, twins)


def test_large_tensors(variant):
    fused, oracle, params, twins = _pair(variant.device, BF16, lists.SHAPES)
    training.train(fused, oracle, params, twins, steps=2)
    training.assert_trained(params, twins, steps=2)


def test_groups_that_are_skipped(variant):
    """Biases, say, take lr as it is, in one launch."""
    params = training.parameters(F32, variant.device)
    twins = training.twins_of(params)
    fused = FusedLARS(
        [dict(params=params[:3], is_skipped=True, lr=0.1), dict(params=params[3:], eps=0.5)], **USUAL
    )
    oracles = [
        lars(twins[:3], skip=True, **(USUAL | dict(lr=0.1))),
        lars(twins[3:], **(USUAL | dict(eps=0.5))),
    ]
    for step in (1, 2, 3):
        training.give_gradients(params, twins, step)
        fused.step()
        for oracle in oracles:
            oracle.step()
    training.assert_trained(params, twins)
    assert training.launches(variant, "multi_tensor_lars") in (None, 3 * (1 + 2))


def test_gradients_that_come_and_go(variant):
    fused, oracle, params, twins = _pair(variant.device)
    for step, without in enumerate([(0, 3), (3,), (2,), ()], start=1):
        before = lists.clones([params[i] for i in without])
        training.give_gradients(params, twins, step, without=without)
        fused.step()
        oracle.step()
        lists.assert_same_bits([params[i] for i in without], before)
    training.assert_trained(params, twins, steps=4)


def test_layers_of_zeros_move(variant):
    fused, oracle, params, twins = _pair(variant.device, lr=0.1)
    with torch.no_grad():
        for some in (params, twins):
            some[3].zero_()
    training.train(fused, oracle, params, twins)
    training.assert_trained(params, twins)
    assert params[3].ne(0).any()


def test_memory_orders(variant):
    params = [torch.nn.Parameter(t) for t in lists.channels_last(F32, variant.device)]
    params += [torch.nn.Parameter(t) for t in lists.misaligned(lists.random(F32, variant.device, ((5, 9),)))]
    twins = training.twins_of(params)
    training.train(FusedLARS(params, **USUAL), lars(twins, **USUAL), params, twins)
    training.assert_trained(params, twins)


def test_a_parameter_with_gaps(variant):
    """No kernel takes it; the reference does."""
    variant.mixed = True
    params = [torch.nn.Parameter(torch.randn(6, 10, device=variant.device, dtype=F32)[:, ::3])]
    twins = training.twins_of(params)
    training.train(FusedLARS(params, **USUAL), lars(twins, **USUAL), params, twins)
    training.assert_trained(params, twins)


def test_two_launches_a_dtype(variant):
    params = [p for dtype in DTYPES * 2 for p in training.parameters(dtype, variant.device)]
    twins = training.twins_of(params)
    training.train(FusedLARS(params, **USUAL), lars(twins, **USUAL), params, twins)
    training.assert_trained(params, twins)
    assert training.launches(variant, "multi_tensor_lars") in (None, 3 * 2 * len(DTYPES))


def test_nothing_to_do(variant):
    FusedLARS(training.parameters(F32, variant.device), lr=0.1).step()
    FusedLARS([dict(params=[])], lr=0.1).step()
    assert not training.launches(variant, "multi_tensor_lars")


# ---- states ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_buffers_have_the_parameters_dtype(variant, dtype):
    """As public apex's have."""
    fused, oracle, params, twins = _pair(variant.device, dtype)
    training.train(fused, oracle, params, twins, steps=1)
    buffers = training.state_values(fused, "momentum_buffer")
    assert all(b.dtype == dtype for b in buffers)
    values = [state["buffer"] for state in oracle.states]
    lists.assert_near(buffers, values, arithmetic=16, smallest=16 * lists.ROUNDING[buffers[0].dtype])


def test_state_dict_round_trip(variant):
    fused, oracle, params, twins = _pair(variant.device, BF16)
    training.train(fused, oracle, params, twins, steps=2, without=(2,))
    again = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = FusedLARS(again, lr=99.0)
    other.load_state_dict(copy.deepcopy(fused.state_dict()))
    for step in (3, 4):
        training.give_gradients(params, twins, step)
        training.give_gradients(again, twins, step)
        fused.step()
        other.step()
    lists.assert_same_bits(again, params)


def test_continues_public_apexs_checkpoint(variant):
    """Its buffers have the parameter's dtype."""
    (p,) = training.parameters(F16, variant.device, ((5,),))
    p.grad = torch.zeros_like(p)
    fused = FusedLARS([p], lr=0.0, momentum=0.5)
    fused.step()
    checkpoint = copy.deepcopy(fused.state_dict())
    checkpoint["state"][0]["momentum_buffer"] = torch.full((5,), 3.0, dtype=F16, device="cpu")
    fused.load_state_dict(checkpoint)
    fused.step()
    (buffer,) = training.state_values(fused, "momentum_buffer")
    assert buffer.dtype == F16 and buffer.eq(1.5).all()


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"]
)
def test_copies_go_on_alike(variant, again):
    fused, oracle, params, twins = _pair(variant.device)
    training.train(fused, oracle, params, twins, steps=2)
    other = again(fused)
    copies = other.param_groups[0]["params"]
    training.give_gradients(params, twins, 3)
    training.give_gradients(copies, twins, 3)
    fused.step()
    other.step()
    lists.assert_same_bits(copies, params)


def test_get_momentums(variant):
    """Public apex's helper: of parameters that have a gradient."""
    params = training.parameters(F32, variant.device)
    fused = FusedLARS(params, lr=0.1)
    assert fused.get_momentums(params) == ([], True)
    params[3].grad = torch.ones_like(params[3])
    (buffer,), first = fused.get_momentums(params)
    assert first and buffer.shape == params[3].shape
    (again,), first = fused.get_momentums(params)
    assert not first and again is buffer


# ---- scalars on the device, loss scaling -----------------------------------------------------------------


def test_a_tensor_as_learning_rate(variant):
    lr = torch.tensor(1.0, device=variant.device, dtype=F32)
    fused, oracle, params, twins = _pair(variant.device, lr=lr)
    oracle.lr = 1.0
    training.train(fused, oracle, params, twins)
    lr.fill_(0.5)
    oracle.lr = 0.5
    training.train(fused, oracle, params, twins)
    training.assert_trained(params, twins, steps=6)


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_unscales_on_the_device(variant, dtype):
    """Norms are of unscaled gradients."""
    fused, oracle, params, twins = _pair(variant.device, dtype)
    fused.grad_scale, fused.found_inf = scalar(4.0, variant.device), scalar(0.0, variant.device)
    training.train(fused, oracle, params, twins, scale=4.0)
    training.assert_trained(params, twins)


def test_under_a_grad_scaler(variant):
    fused, oracle, params, twins = _pair(variant.device)
    scaler = torch.amp.GradScaler(variant.device.type, init_scale=1024.0, growth_interval=1000)
    scaler.scale(torch.zeros((), device=variant.device, dtype=F32))  # makes the scale
    for step in (1, 2, 3):
        training.give_gradients(params, twins, step, scale=scaler.get_scale())
        if step == 2:
            params[-1].grad[-1] = float("inf")
        else:
            oracle.step()
        scaler.step(fused)
        scaler.update()
    training.assert_trained(params, twins)


def test_amps_scale(variant):
    """What amp's scaler leaves to step(), once."""
    fused, oracle, params, twins = _pair(variant.device)
    fused.most_recent_scale = 4.0
    training.train(fused, oracle, params, twins, steps=1, scale=4.0)
    assert fused.most_recent_scale == 1.0
    training.train(fused, oracle, params, twins, steps=2)
    training.assert_trained(params, twins)


@pytest.mark.gpu
def test_a_captured_step(variant):
    """Replays take new gradients, a new learning rate and a raised flag."""
    lr = torch.tensor(0.1, device=variant.device, dtype=F32)
    fused, oracle, params, twins = _pair(variant.device, lr=lr)
    training.replay(fused, oracle, params, twins, lr)
    training.assert_trained(params, twins, steps=4)


# ---- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, options",
    [
        ("lr must not be negative", dict(lr=-1.0)),
        ("momentum must not be negative", dict(lr=0.1, momentum=-0.1)),
        ("weight_decay must not be negative", dict(lr=0.1, weight_decay=float("nan"))),
        ("eps must not be negative", dict(lr=0.1, eps=-0.1)),
        ("trust_coefficient must not be negative", dict(lr=0.1, trust_coefficient=-0.1)),
        ("Nesterov momentum requires", dict(lr=0.1, nesterov=True)),
        ("Nesterov momentum requires", dict(lr=0.1, nesterov=True, momentum=0.9, dampening=0.1)),
        ("didn't specify a value of required", dict()),
    ],
)
def test_bad_options(words, options):
    with pytest.raises(ValueError, match=words):
        FusedLARS([torch.nn.Parameter(torch.ones(1, dtype=F32, device="cpu"))], **options)


def test_bad_parameters(variant):
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64, device=variant.device))
    p.grad = torch.ones_like(p)
    with pytest.raises(TypeError, match="parameter 0 of group 0 is torch.complex64"):
        FusedLARS([p], lr=0.1).step()
    p = torch.nn.Parameter(torch.ones(3, 2, device=variant.device, dtype=F32))
    p.grad = torch.ones_like(p).to_sparse()
    with pytest.raises(RuntimeError, match="sparse gradient"):
        FusedLARS([p], lr=0.1).step()
