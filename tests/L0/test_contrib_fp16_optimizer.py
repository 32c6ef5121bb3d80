"""contrib's FP16_Optimizer against an optimizer over float32 parameters, and its scale, checkpoints and refusals."""

from __future__ import annotations

import copy
import io

import lists
import pytest
import torch
from lists import F16, F32

from apex import fp16_utils
from apex.contrib.optimizers import FP16_Optimizer
from apex.optimizers import FusedAdam, FusedLAMB, FusedSGD

pytestmark = pytest.mark.filterwarnings("ignore:FP16_Optimizer is of old")
SHAPES = ((3,), (33, 5), (1,))
KINDS = {
    "FusedAdam": lambda params: FusedAdam(params, lr=1e-2, weight_decay=0.1),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=1e-2),
    "FusedSGD": lambda params: FusedSGD(params, lr=1e-2, momentum=0.9),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
}


def parameters(dtype, device="cpu"):
    return [torch.nn.Parameter(t) for t in lists.random(dtype, device, SHAPES)]


def give_gradients(optimizer, params, step, device="cpu"):
    """Through backward(), so scaled; the gradients that were asked for."""
    wanted = lists.random(F16, device, SHAPES, seed=100 + step)
    optimizer.zero_grad()
    optimizer.backward(sum((p.float() * g.float()).sum() for p, g in zip(params, wanted, strict=True)))
    return wanted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [dict(static_loss_scale=64.0), dict(dynamic_loss_scale=True)])
def test_masters_go_as_float32_parameters(device, kind, scale):
    params = parameters(F16, device)
    twins = [torch.nn.Parameter(p.detach().float()) for p in params]
    optimizer, oracle = FP16_Optimizer(KINDS[kind](params), **scale), KINDS[kind](twins)
    if scale.get("dynamic_loss_scale"):
        optimizer.cur_scale = 256.0  # 2**16 times these gradients overflows float16
    for step in range(4):
        for twin, grad in zip(twins, give_gradients(optimizer, params, step, device), strict=True):
            twin.grad = grad.float()
        optimizer.step()
        oracle.step()
    (masters,) = optimizer.fp32_groups
    for p, master, twin in zip(params, masters, twins, strict=True):
        torch.testing.assert_close(master.detach(), twin.detach(), rtol=1e-6, atol=1e-6)
        assert torch.equal(p.detach(), master.detach().half())
        assert master.grad is None


def test_an_overflow_skips_and_halves(capsys):
    params = parameters(F16)
    before = copy.deepcopy(params)
    optimizer = FP16_Optimizer(FusedSGD(params, lr=0.1), dynamic_loss_scale=True)
    assert optimizer.cur_scale == 65536.0
    give_gradients(optimizer, params, 0)
    assert params[1].grad.isinf().any()
    optimizer.step()
    assert optimizer.cur_scale == 32768.0 and optimizer.last_overflow_iter == 0 and optimizer.cur_iter == 1
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    assert "skipped" in capsys.readouterr().out


def test_the_scale_stays_at_least_one_and_doubles_after_its_window():
    params = parameters(F16)
    optimizer = FP16_Optimizer(FusedSGD(params, lr=0.0), dynamic_loss_scale=True, verbose=False)
    for _ in range(20):
        for p in params:
            p.grad = torch.full_like(p, float("nan"))
        optimizer.step()
    assert optimizer.cur_scale == 1.0
    for p in params:
        p.grad = torch.ones_like(p)
    for _ in range(999):
        optimizer.step()
    assert optimizer.cur_scale == 1.0
    optimizer.step()
    assert optimizer.cur_scale == 2.0


def test_a_parameter_without_a_gradient_stays():
    params = parameters(F16)
    before = params[0].detach().clone()
    optimizer = FP16_Optimizer(FusedAdam(params, lr=0.1))
    params[1].grad = torch.ones_like(params[1])
    optimizer.step()
    optimizer.zero_grad(set_grads_to_None=False)
    assert torch.equal(params[0], before) and params[1].grad.eq(0).all() and params[0].grad is None
    optimizer.zero_grad()
    optimizer.step()  # no gradient at all
    assert params[1].grad is None and optimizer.cur_iter == 2


def test_a_step_that_raised_leaves_no_gradient(monkeypatch):
    params = parameters(F16)
    optimizer = FP16_Optimizer(FusedAdam(params, lr=0.1))

    def fail():
        raise KeyError

    give_gradients(optimizer, params, 0)
    monkeypatch.setattr(optimizer.optimizer, "step", fail)
    with pytest.raises(KeyError):
        optimizer.step()
    assert all(master.grad is None for master in optimizer.fp32_groups[0])


def test_checkpoints_go_on_bit_for_bit():
    params = parameters(F16)
    optimizer = FP16_Optimizer(FusedAdam(params, lr=1e-2), dynamic_loss_scale=True)
    optimizer.cur_scale = 16.0
    for step in range(3):
        give_gradients(optimizer, params, step)
        optimizer.step()
    file = io.BytesIO()
    torch.save([optimizer.state_dict(), params], file)
    file.seek(0)
    state, saved = torch.load(file, weights_only=False)
    other = FP16_Optimizer(FusedAdam(saved, lr=1.0), dynamic_loss_scale=True)
    other.load_state_dict(state)
    for one, its in ((optimizer, params), (other, saved)):
        give_gradients(one, its, 7)
        one.step()
    assert other.cur_iter == 4 and other.cur_scale == 16.0 and other.param_groups[0]["lr"] == 1e-2
    for a, b in zip(optimizer.fp32_groups[0], other.fp32_groups[0], strict=True):
        assert torch.equal(a, b)


def test_refusals():
    optimizer = FP16_Optimizer(FusedAdam(parameters(F16)))
    with pytest.raises(TypeError, match="wraps an optimizer, not FP16_Optimizer"):
        FP16_Optimizer(optimizer)
    with pytest.raises(ValueError, match="dynamic_loss_args"):
        FP16_Optimizer(
            FusedAdam(parameters(F16)), dynamic_loss_scale=True, dynamic_loss_args={"scale_window": 2}
        )
    with pytest.raises(ValueError, match="above 0"):
        FP16_Optimizer(FusedAdam(parameters(F16)), static_loss_scale=0.0)
    with pytest.raises(NotImplementedError, match="closure"):
        optimizer.step(lambda: None)
    with pytest.raises(ValueError, match="lacks fp32_groups"):
        optimizer.load_state_dict({k: v for k, v in optimizer.state_dict().items() if k != "fp32_groups"})
    others = FP16_Optimizer(FusedAdam([torch.nn.Parameter(torch.ones(2, dtype=F32, device="cpu"))]))
    with pytest.raises(ValueError, match="other shapes"):
        optimizer.load_state_dict(others.state_dict())


@pytest.mark.parametrize(
    "inner, outer", [(FP16_Optimizer, fp16_utils.FP16_Optimizer), (fp16_utils.FP16_Optimizer, FP16_Optimizer)]
)
def test_neither_kind_wraps_the_other(inner, outer):
    wrapped = inner(FusedAdam(parameters(F16)))
    with pytest.raises(TypeError, match="not FP16_Optimizer"):
        outer(wrapped)
