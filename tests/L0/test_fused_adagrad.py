"""FusedAdagrad against torch.optim.Adagrad in float64, on everything that can serve it."""

from __future__ import annotations

import copy
import pickle

import lists
import pytest
import torch
import training
from lists import BF16, F16, F32, F64, scalar
from torch_defaults import float32_on_cpu

from apex.optimizers import FusedAdagrad

Adagrad = float32_on_cpu()(torch.optim.Adagrad)  # which counts in tensors of the default device
DTYPES = (F32, F16, BF16, F64)
OPTIONS = [dict(), dict(lr=0.1, weight_decay=0.1), dict(lr=0.1, eps=0.5)]
USUAL = OPTIONS[1]


def _pair(device, dtype=F32, shapes=training.SHAPES, **options):
    """FusedAdagrad, torch's Adagrad, their parameters."""
    params = training.parameters(dtype, device, shapes)
    twins = training.twins_of(params)
    return FusedAdagrad(params, **options), Adagrad(twins, **options), params, twins


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_torchs(variant, dtype, options):
    fused, oracle, params, twins = _pair(variant.device, dtype, **options)
    training.train(fused, oracle, params, twins)
    training.assert_trained(params, twins)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decoupled_decay(variant, dtype):
    """Public apex's own option."""
    params = training.parameters(dtype, variant.device)
    twins = training.twins_of(params)

    def update(state, p, g):
        state["sum"] = state.get("sum", 0) + g * g
        return p - 0.1 * (g / (state["sum"].sqrt() + 1e-10) + 0.2 * p)

    fused = FusedAdagrad(params, lr=0.1, weight_decay=0.2, adagrad_w_mode=True)
    training.train(fused, training.Oracle(twins, update), params, twins)
    training.assert_trained(params, twins)


def test_large_tensors(variant):
    fused, oracle, params, twins = _pair(variant.device, BF16, lists.SHAPES, **USUAL)
    training.train(fused, oracle, params, twins, steps=2)
    training.assert_trained(params, twins, steps=2)


def test_gradients_that_come_and_go(variant):
    fused, oracle, params, twins = _pair(variant.device, **USUAL)
    for step, without in enumerate([(0, 3), (3,), (2,), ()], start=1):
        before = lists.clones([params[i] for i in without])
        training.give_gradients(params, twins, step, without=without)
        fused.step()
        oracle.step()
        lists.assert_same_bits([params[i] for i in without], before)
    training.assert_trained(params, twins, steps=4)


def test_memory_orders(variant):
    params = [torch.nn.Parameter(t) for t in lists.channels_last(F32, variant.device)]
    params += [torch.nn.Parameter(t) for t in lists.misaligned(lists.random(F32, variant.device, ((5, 9),)))]
    twins = training.twins_of(params)
    training.train(FusedAdagrad(params, **USUAL), Adagrad(twins, **USUAL), params, twins)
    training.assert_trained(params, twins)


def test_a_parameter_with_gaps(variant):
    """No kernel takes it; the reference does."""
    variant.mixed = True
    params = [torch.nn.Parameter(torch.randn(6, 10, device=variant.device, dtype=F32)[:, ::3])]
    twins = training.twins_of(params)
    training.train(FusedAdagrad(params, **USUAL), Adagrad(twins, **USUAL), params, twins)
    training.assert_trained(params, twins)


def test_one_launch_a_dtype(variant):
    params = [p for dtype in DTYPES * 2 for p in training.parameters(dtype, variant.device)]
    twins = training.twins_of(params)
    training.train(FusedAdagrad(params, **USUAL), Adagrad(twins, **USUAL), params, twins)
    training.assert_trained(params, twins)
    assert training.launches(variant, "multi_tensor_adagrad") in (None, 3 * len(DTYPES))


def test_groups(variant):
    params = training.parameters(F32, variant.device)
    twins = training.twins_of(params)
    pairs = []
    for kind, p in ((FusedAdagrad, params), (Adagrad, twins)):
        pairs.append(kind([dict(params=p[:3], lr=0.2), dict(params=p[3:], weight_decay=0.3)], lr=0.1))
    training.train(*pairs, params, twins)
    training.assert_trained(params, twins)


def test_nothing_to_do(variant):
    FusedAdagrad(training.parameters(F32, variant.device)).step()
    FusedAdagrad([dict(params=[])]).step()
    assert not training.launches(variant, "multi_tensor_adagrad")


# ---- states ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_have_full_precision(variant, dtype):
    fused, oracle, params, twins = _pair(variant.device, dtype, lr=0.1)
    training.train(fused, oracle, params, twins)
    sums = training.state_values(fused, "sum")
    assert all(s.dtype == (F64 if dtype == F64 else F32) for s in sums)
    lists.assert_near(sums, training.state_values(oracle, "sum"), arithmetic=6)


def test_state_dict_round_trip(variant):
    fused, oracle, params, twins = _pair(variant.device, BF16, **USUAL)
    training.train(fused, oracle, params, twins, steps=2, without=(2,))
    assert "step" not in fused.state_dict()["param_groups"][0]
    again = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = FusedAdagrad(again, lr=99.0)
    other.load_state_dict(copy.deepcopy(fused.state_dict()))
    for step in (3, 4):
        training.give_gradients(params, twins, step)
        training.give_gradients(again, twins, step)
        fused.step()
        other.step()
    lists.assert_same_bits(again, params)


def test_continues_torchs_checkpoint(variant):
    _, oracle, params, twins = _pair(variant.device, F32, **USUAL)
    training.train(training.Oracle(params, lambda state, p, g: p), oracle, params, twins, steps=2)
    with torch.no_grad():
        for p, twin in zip(params, twins, strict=True):
            p.copy_(twin)
    fused = FusedAdagrad(params, lr=99.0)
    fused.load_state_dict(oracle.state_dict())
    for step in (3, 4):
        training.give_gradients(params, twins, step)
        fused.step()
        oracle.step()
    training.assert_trained(params, twins, steps=2)


def test_continues_public_apexs_checkpoint(variant):
    """Its sums have the parameter's dtype."""
    (p,) = training.parameters(F16, variant.device, ((5,),))
    p.grad = torch.ones_like(p)
    fused = FusedAdagrad([p], lr=0.0)
    fused.step()
    checkpoint = copy.deepcopy(fused.state_dict())
    checkpoint["state"][0]["sum"] = torch.full((5,), 3.0, dtype=F16, device="cpu")
    fused.load_state_dict(checkpoint)
    fused.step()
    (total,) = training.state_values(fused, "sum")
    assert total.dtype == F32 and total.eq(4).all()


def test_a_checkpoint_with_lr_decay_is_refused():
    oracle = Adagrad([torch.nn.Parameter(torch.ones(1, dtype=F32, device="cpu"))], lr_decay=0.1)
    with pytest.raises(ValueError, match="lr_decay"):
        FusedAdagrad([torch.nn.Parameter(torch.ones(1, dtype=F32, device="cpu"))]).load_state_dict(
            oracle.state_dict()
        )


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"]
)
def test_copies_keep_their_options(variant, again):
    copied = again(FusedAdagrad(training.parameters(F32, variant.device), adagrad_w_mode=True))
    assert copied.adagrad_w_mode == 1
    for p in copied.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    copied.step()


# ---- scalars on the device, loss scaling -----------------------------------------------------------------


def test_a_tensor_as_learning_rate(variant):
    lr = torch.tensor(0.1, device=variant.device, dtype=F32)
    params = training.parameters(F32, variant.device)
    twins = training.twins_of(params)
    fused, oracle = FusedAdagrad(params, lr=lr), Adagrad(twins, lr=0.1)
    training.train(fused, oracle, params, twins)
    lr.fill_(0.5)
    oracle.param_groups[0]["lr"] = 0.5
    training.train(fused, oracle, params, twins)
    training.assert_trained(params, twins, steps=6)


def test_under_a_grad_scaler(variant):
    """Unscaled on the device, a step with an inf skipped there."""
    fused, oracle, params, twins = _pair(variant.device, F32, **USUAL)
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


@pytest.mark.gpu
def test_a_captured_step(variant):
    """Replays take new gradients, a new learning rate and a raised flag."""
    lr = torch.tensor(0.1, device=variant.device, dtype=F32)
    params = training.parameters(F32, variant.device)
    twins = training.twins_of(params)
    fused, oracle = FusedAdagrad(params, lr=lr), Adagrad(twins, lr=0.1)
    training.replay(fused, oracle, params, twins, lr)
    training.assert_trained(params, twins, steps=4)


# ---- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["lr", "eps", "weight_decay"])
def test_bad_options(option):
    for value in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=f"{option} must not be negative"):
            FusedAdagrad([torch.nn.Parameter(torch.ones(1, dtype=F32, device="cpu"))], **{option: value})


def test_bad_parameters(variant):
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64, device=variant.device))
    p.grad = torch.ones_like(p)
    with pytest.raises(TypeError, match="parameter 0 of group 0 is torch.complex64"):
        FusedAdagrad([p]).step()
    p = torch.nn.Parameter(torch.ones(3, 2, device=variant.device, dtype=F32))
    p.grad = torch.ones_like(p).to_sparse()
    with pytest.raises(RuntimeError, match="sparse gradient"):
        FusedAdagrad([p]).step()


def test_unscales_half_gradients(variant):
    fused, oracle, params, twins = _pair(variant.device, F16, **USUAL)
    fused.grad_scale, fused.found_inf = scalar(4.0, variant.device), scalar(0.0, variant.device)
    training.train(fused, oracle, params, twins, scale=4.0)
    training.assert_trained(params, twins)
