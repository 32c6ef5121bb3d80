"""FP16_Optimizer around torch's optimizers and the fused ones."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from apex.amp._errors import AmpWarning
from apex.amp.scaler import LossScaler
from apex.fp16_utils import DynamicLossScaler, FP16_Optimizer, convert_network
from apex.optimizers import FusedAdam, FusedSGD
from apex.parallel.LARC import LARC

pytestmark = pytest.mark.filterwarnings("ignore:FP16_Optimizer is of old:DeprecationWarning")

EPS = 1e-2  # a bias before a batch norm has no gradient but noise, which a small one would make large
OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, eps=EPS),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.05, momentum=0.9),
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01, eps=EPS),
    "LARC": lambda params: LARC(torch.optim.SGD(params, lr=0.05), trust_coefficient=0.05),
}
HALVES = [torch.float16, torch.bfloat16]


def network(dtype=torch.float16):
    """(N, 6) -> (N, 3): half precision, and a batch norm in float32."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8, dtype=torch.float32, device="cpu"),
        nn.BatchNorm1d(8, dtype=torch.float32, device="cpu"),
        nn.Tanh(),
        nn.Linear(8, 3, dtype=torch.float32, device="cpu"),
    )
    return convert_network(model, dtype)


def loss_of(model, step=0):
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float32, device="cpu")
    return model(x.to(model[0].weight.dtype)).float().square().mean()


def wrap(model, name="SGD", **options):
    return FP16_Optimizer(OPTIMIZERS[name](model.parameters()), verbose=False, **options)


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, step))
        optimizer.step()


def masters(optimizer):
    return [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]


def equal(left, right):
    return len(left) == len(right) and all(map(torch.equal, left, right))


def close(left, right, tolerance):
    for p, q in zip(left, right, strict=True):
        torch.testing.assert_close(p.float(), q.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", [{}, {"static_loss_scale": 128.0}, {"dynamic_loss_scale": True}], ids=str)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trains_like_float32(name, dtype, options):
    model, exact = network(dtype), network(torch.float32)
    optimizer, oracle = wrap(model, name, **options), OPTIMIZERS[name](exact.parameters())
    train(model, optimizer, range(5))
    for step in range(5):
        oracle.zero_grad()
        loss_of(exact, step).backward()
        oracle.step()
    assert all(p.dtype == torch.float32 for p in masters(optimizer))
    close(masters(optimizer), exact.parameters(), 1e-2 if dtype == torch.float16 else 5e-2)
    for p, master in zip(model.parameters(), masters(optimizer), strict=True):
        assert torch.equal(p, master.to(p.dtype))


def test_which_parameters_get_masters(capsys):
    model = network()
    model[3].bias.requires_grad_(False)
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert "3 parameters with master weights, 2 without" in capsys.readouterr().out
    assert [id(p) for p in optimizer.all_fp16_params] == [
        id(p) for p in (model[0].weight, model[0].bias, model[3].weight)
    ]
    assert [id(p) for p in optimizer.all_fp32_from_fp32_params] == [id(p) for p in model[1].parameters()]
    assert optimizer.param_groups[0]["params"][-1] is model[3].bias
    double = nn.Linear(1, 1, dtype=torch.float32, device="cpu").double()
    wrap(double)
    with pytest.raises(TypeError, match="parameter 0 of group 0 is torch.complex64"):
        wrap(nn.ParameterList([nn.Parameter(torch.ones(1, dtype=torch.complex64, device="cpu"))]))
    with pytest.warns(DeprecationWarning, match="apex.amp"):
        wrap(network())


def test_states_that_were_there_move_to_the_masters():
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of(model).backward()
    inner.step()
    optimizer = FP16_Optimizer(inner, verbose=False)
    assert set(optimizer.state) == set(optimizer.param_groups[0]["params"])
    assert all(s["momentum_buffer"].dtype == torch.float32 for s in optimizer.state.values())
    train(model, optimizer, range(1))


@pytest.mark.parametrize("scale", [128.0, "dynamic"])
@pytest.mark.parametrize("update", [True, False])
def test_gradients_of_several_passes_add_up(update, scale):
    """Those of half-precision and of full-precision parameters, and over a change of the scale."""
    model, exact = network(), network(torch.float32)
    options = {"static_loss_scale": scale} if scale != "dynamic" else {
        "dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 16.0, "scale_window": 1}
    }  # fmt: skip
    optimizer = wrap(model, **options)
    for step in range(3):
        optimizer.backward(loss_of(model, step), update_master_grads=update)
        loss_of(exact, step).backward()
    if not update:
        optimizer.update_master_grads()
    if scale == "dynamic":
        assert optimizer.loss_scale == (128.0 if update else 32.0)
    found = [g for group in optimizer.inspect_master_grad_data() for g in group]
    assert all(g.dtype == torch.float32 for g in found)
    close(found, [p.grad for p in exact.parameters()], 5e-3)
    optimizer.zero_grad(set_grads_to_None=True)
    assert optimizer.inspect_master_grad_data() == [[None] * 6]
    assert all(p.grad is None for p in model.parameters())


def test_zero_grad_of_the_model_is_enough():
    """As in public apex: masters get what the model's gradients hold."""
    model, exact = network(), network(torch.float32)
    optimizer = wrap(model, static_loss_scale=16.0)
    for step in range(2):
        model.zero_grad()
        exact.zero_grad()
        optimizer.backward(loss_of(model, step))
        loss_of(exact, step).backward()
        found = [g for group in optimizer.inspect_master_grad_data() for g in group]
        close(found, [p.grad for p in exact.parameters()], 5e-3)


def test_retained_graph():
    model = network()
    optimizer = wrap(model, static_loss_scale=4.0)
    loss = loss_of(model)
    optimizer.backward(loss, retain_graph=True)
    once = [g.clone() for g in optimizer.inspect_master_grad_data()[0]]
    optimizer.backward(loss)
    close(optimizer.inspect_master_grad_data()[0], [2 * g for g in once], 1e-3)


@pytest.mark.parametrize("overflows", ["half", "full", "first pass"])
def test_an_overflow_is_skipped(overflows, capsys):
    model = network()
    optimizer = wrap(model, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 8.0})
    optimizer.verbose = True
    train(model, optimizer, range(1))
    before, weights = masters(optimizer), [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    if overflows == "full":
        optimizer.backward(model[1].weight.sum() * float("inf"))
    else:
        optimizer.backward(model[0].weight.sum() * float("inf"))
    if overflows == "first pass":
        optimizer.backward(loss_of(model))
    assert optimizer.overflow
    with pytest.warns(UserWarning, match="overflow"):
        assert optimizer.inspect_master_grad_data() is None
    assert optimizer.clip_master_grads(1.0) == -1
    optimizer.step()
    assert optimizer.overflow  # scripts ask after the step
    assert "4.0" in capsys.readouterr().out and optimizer.loss_scale == 4.0 or overflows == "first pass"
    assert equal(masters(optimizer), before) and equal(list(model.parameters()), weights)
    train(model, optimizer, range(1, 2))
    assert not optimizer.overflow and not equal(masters(optimizer), before)


def test_an_overflow_with_a_static_scale_is_taken():
    model = network()
    optimizer = wrap(model, static_loss_scale=2.0)
    optimizer.backward(model[0].weight.sum() * float("inf"))
    assert not optimizer.overflow


@pytest.mark.parametrize("norm_type", [2, float("inf")])
def test_clipping(norm_type):
    model, exact = network(), network(torch.float32)
    optimizer = wrap(model, static_loss_scale=64.0)
    optimizer.backward(loss_of(model))
    loss_of(exact).backward()
    wanted = nn.utils.clip_grad_norm_(exact.parameters(), 0.01, norm_type)
    assert optimizer.clip_master_grads(0.01, norm_type).item() == pytest.approx(wanted.item(), rel=1e-2)
    close(optimizer.inspect_master_grad_data()[0], [p.grad for p in exact.parameters()], 1e-3)


def test_unused_parameters():
    model = nn.ModuleList(
        [
            nn.Linear(2, 2, dtype=torch.float32, device="cpu").half(),
            nn.Linear(2, 2, dtype=torch.float32, device="cpu").half(),
            nn.BatchNorm1d(2, dtype=torch.float32, device="cpu"),
        ]
    )
    optimizer = wrap(model, "FusedAdam", static_loss_scale=4.0)
    before = masters(optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.backward(model[0](torch.ones(1, 2, dtype=torch.float32, device="cpu").half()).sum())
        optimizer.step()
    assert [g is None for g in optimizer.inspect_master_grad_data()[0]] == [False] * 2 + [True] * 4
    changed = [not torch.equal(a, b) for a, b in zip(masters(optimizer), before, strict=True)]
    assert changed == [True] * 2 + [False] * 4


def test_closures():
    """LBFGS moves the masters between calls; an overflow in a closure is tried again with a smaller scale."""
    model = network()
    optimizer = FP16_Optimizer(
        torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 2.0**24},
        verbose=False,
    )
    losses, scales = [], []

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        optimizer.backward(loss)
        scales.append(optimizer.loss_scale)
        losses.append(loss.item())
        return loss

    assert optimizer.step(closure).item() == losses[0]
    assert scales[0] == 2.0**23 and len(set(losses)) >= 4 and losses[-1] < losses[0]
    assert not optimizer.overflow

    def hopeless():
        optimizer.zero_grad()
        optimizer.backward(loss_of(model) * float("nan"))

    with (
        pytest.warns(AmpWarning, match="its floor"),
        pytest.raises(RuntimeError, match="at every loss scale"),
    ):
        optimizer.step(hopeless)
    assert optimizer.loss_scale == 2.0**-24


def test_endless_overflows():
    model = network()
    optimizer = wrap(model, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 8.0, "scale_window": 2})
    before = masters(optimizer)
    with pytest.warns(AmpWarning, match="its floor") as told:
        for _ in range(1200):
            optimizer.zero_grad()
            optimizer.backward(loss_of(model) * float("inf"))
            optimizer.step()
    assert len(told) == 1 and optimizer.loss_scale == 2.0**-24
    assert all(map(torch.equal, masters(optimizer), before))
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.backward(loss_of(model))
        optimizer.step()
    assert optimizer.loss_scale == 2.0**-23 and all(m.isfinite().all() for m in masters(optimizer))


def test_the_scaler_to_use_by_hand_stays_at_1():
    scaler = DynamicLossScaler(init_scale=2.0**4, scale_window=2)
    for _ in range(1200):
        scaler.update_scale(True)
    assert scaler.loss_scale == 1
    for _ in range(2):
        scaler.update_scale(False)
    assert scaler.loss_scale == 2


def test_loss_scale():
    optimizer = wrap(network(), static_loss_scale=8.0)
    assert optimizer.loss_scale == 8.0
    optimizer.loss_scale = 2.0
    model = nn.Linear(1, 1, bias=False, dtype=torch.float32, device="cpu").half()
    optimizer = wrap(model, static_loss_scale=8.0)
    optimizer.loss_scale = 2.0
    optimizer.backward(model(torch.ones(1, 1, dtype=torch.float32, device="cpu").half()).sum())
    assert model.weight.grad.item() == 2.0 and optimizer.inspect_master_grad_data()[0][0].item() == 1.0


def checkpoint(model, optimizer):
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_goes_on_bit_for_bit(name):
    options = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 16.0, "scale_window": 2}}
    model = network()
    optimizer = wrap(model, name, **options)
    train(model, optimizer, range(3))
    saved = checkpoint(model, optimizer)
    train(model, optimizer, range(3, 6))

    again = network()
    resumed = wrap(again, name, **options)
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.loss_scale == 32.0
    train(again, resumed, range(3, 6))
    assert equal(masters(optimizer), masters(resumed)) and resumed.loss_scale == optimizer.loss_scale


def test_public_checkpoints():
    """Public apex pickles the scaler itself."""
    model = network()
    optimizer = wrap(model, dynamic_loss_scale=True)
    state = optimizer.state_dict()
    state["loss_scaler"] = LossScaler.__new__(LossScaler)
    vars(state["loss_scaler"]).update(_loss_scale=512.0, _unskipped=7, dynamic=True)
    state = pickle.loads(pickle.dumps(state))
    optimizer.load_state_dict(state)
    assert optimizer.loss_scale == 512.0 and optimizer.loss_scaler._unskipped == 7
    train(model, optimizer, range(1))


def test_what_it_refuses():
    optimizer = wrap(network())
    other = FP16_Optimizer(
        torch.optim.SGD(nn.Linear(2, 2, dtype=torch.float32, device="cpu").half().parameters(), lr=0.1),
        verbose=False,
    )
    before = masters(optimizer)
    with pytest.raises(ValueError, match="another model's"):
        optimizer.load_state_dict(other.state_dict())
    partial = {k: v for k, v in optimizer.state_dict().items() if k != "loss_scaler"}
    for wrong in (optimizer.optimizer.state_dict(), {}, partial):  # a bare optimizer's, for one
        with pytest.raises(ValueError, match=r"lacks (.*, )*loss_scaler.*optimizer.load_state_dict"):
            optimizer.load_state_dict(wrong)
    assert equal(masters(optimizer), before)
    with pytest.raises(RuntimeError, match="state_dict"):
        pickle.dumps(optimizer)
    with pytest.raises(RuntimeError, match="state_dict"):
        copy.copy(optimizer)


@pytest.mark.filterwarnings("ignore:FP16_Optimizer is of old")
def test_what_it_does_not_wrap():
    model = nn.Linear(2, 2, dtype=torch.float32, device="cpu").half()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="not Linear"):
        FP16_Optimizer(model, verbose=False)
    for scale in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="static_loss_scale"):
            FP16_Optimizer(sgd, static_loss_scale=scale, verbose=False)
    optimizer = FP16_Optimizer(sgd, verbose=False)
    with pytest.raises(TypeError, match="not FP16_Optimizer"):
        FP16_Optimizer(optimizer, verbose=False)
    with pytest.raises(TypeError, match="the loss itself"):
        optimizer.backward(3.0)


@pytest.mark.filterwarnings("ignore:FP16_Optimizer is of old")
def test_a_gradient_of_another_layout_between_two_passes():
    weight = nn.Parameter(torch.ones(3, 4, dtype=torch.float32, device="cpu"))
    optimizer = FP16_Optimizer(torch.optim.SGD([weight], lr=1.0), static_loss_scale=4.0, verbose=False)
    factor = torch.arange(12.0, dtype=torch.float32, device="cpu").view(3, 4)
    optimizer.backward((weight * factor).sum())
    weight.grad = weight.grad.T.contiguous().T
    optimizer.backward((weight * factor).sum())
    assert torch.equal(weight.grad, 2 * factor)
