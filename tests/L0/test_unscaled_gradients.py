"""Optimizers that undo torch.amp.GradScaler's scale within step() leave unscaled gradients, as torch's own do."""

import warnings

import lists
import pytest
import torch
from lists import BF16, F16, F32

from apex.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedLARS,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)
from apex.optimizers._scaling import Scaling

OPTIMIZERS = {
    "adam": lambda params: FusedAdam(params, lr=0.1, capturable=True),
    "adam, masters": lambda params: FusedAdam(params, lr=0.1, capturable=True, master_weights=True),
    "sgd": lambda params: FusedSGD(params, lr=0.1),
    "sgd, momentum": lambda params: FusedSGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adagrad": lambda params: FusedAdagrad(params, lr=0.1, weight_decay=0.1),
    "novograd": lambda params: FusedNovoGrad(params, lr=0.1, capturable=True),
    "lars": lambda params: FusedLARS(params, lr=0.1, momentum=0.9, weight_decay=0.1),
}
SCALE = 1000.0  # its inverse rounds


def parameters(device, *dtypes):
    """Vectors, what is left over, views between two vectors, and a matrix whose gradient lies transposed."""
    params = []
    for dtype in dtypes:
        tensors = lists.random(dtype, device, ((2050,), (0,), (40, 30)))
        tensors += lists.misaligned(lists.random(dtype, device, ((77,),), seed=2))
        params += [torch.nn.Parameter(t) for t in tensors]
    return params


def give_gradients(params, seed, as_parameters=False):
    """Scaled ones. as_parameters: in their layout, as torch's fused optimizers want on a GPU."""
    for i, p in enumerate(params):
        grad = lists.random(p.dtype, p.device, (tuple(p.shape),), seed=100 * seed + i)[0]
        p.grad = (grad.t().contiguous().t() if p.dim() == 2 and not as_parameters else grad).mul_(SCALE)


def copies(params):
    return [p.grad.clone(memory_format=torch.preserve_format) for p in params]


def unscaled(grads):
    """By what torch.amp.GradScaler.unscale_ calls, which refuses float16 itself."""
    found = lists.clones(grads)
    inverse = torch.tensor(SCALE, dtype=torch.float64, device="cpu").reciprocal().float().to(grads[0].device)
    for grad in found:
        flag = lists.scalar(0.0, grad.device)
        torch._amp_foreach_non_finite_check_and_unscale_([grad], flag, inverse.reshape(1))
    return found


def scaler_for(device):
    scaler = torch.amp.GradScaler(device.type, init_scale=SCALE, growth_interval=1000)
    scaler.scale(torch.zeros((), device=device, dtype=F32))  # makes the scale
    return scaler


def step(scaler, optimizer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's: it will hand the scale over otherwise
        scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_after_a_step(variant, name, monkeypatch):
    """Rounded to their dtype as torch rounds them; parameters are the same bits as without that."""
    # torch's check for overflows takes bfloat16 on the CPU alone.
    dtypes = (F32, F16) if variant.name == "cuda" else (F32, F16, BF16)
    params = parameters(variant.device, *dtypes)
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    optimizer, other = OPTIMIZERS[name](params), OPTIMIZERS[name](twins)
    scaler = scaler_for(variant.device)
    for seed in (1, 2):
        give_gradients(params, seed)
        give_gradients(twins, seed)
        expected = unscaled(copies(params))
        versions = [p.grad._version for p in params]
        step(scaler, optimizer)
        lists.assert_same_bits([p.grad for p in params], expected)
        assert all(p.grad._version > before for p, before in zip(params, versions, strict=True))
        # The same update where gradients stay as they are: the op's own default.
        other.grad_scale = torch.tensor(SCALE, dtype=F32, device=variant.device)
        other.found_inf = torch.zeros((), device=variant.device, dtype=F32)
        step_without_unscaling(other, monkeypatch)
        lists.assert_same_bits(params, twins)


def step_without_unscaling(optimizer, monkeypatch):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    before = copies(params)
    with monkeypatch.context() as patch:
        patch.setattr(Scaling, "unscaling", Scaling.on)
        optimizer.step()
    lists.assert_same_bits([p.grad for p in params], before)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_unscaled_before(variant, name):
    """Not once more; without a scaler neither."""
    params = parameters(variant.device, F32)
    optimizer, scaler = OPTIMIZERS[name](params), scaler_for(variant.device)
    give_gradients(params, 1)
    expected = unscaled(copies(params))
    scaler.unscale_(optimizer)
    step(scaler, optimizer)
    lists.assert_same_bits([p.grad for p in params], expected)
    give_gradients(params, 2)
    before, versions = copies(params), [p.grad._version for p in params]
    optimizer.step()
    lists.assert_same_bits([p.grad for p in params], before)
    assert [p.grad._version for p in params] == versions


@pytest.mark.parametrize("name", ["torch", *OPTIMIZERS])
def test_skipped(variant, name):
    """Torch's fused optimizers leave the gradients of a skipped step scaled."""
    make = OPTIMIZERS.get(name, lambda params: torch.optim.Adam(params, fused=True))
    if name == "torch":
        variant.mixed = True
    params = parameters(variant.device, F32, F16)
    optimizer, scaler = make(params), scaler_for(variant.device)
    give_gradients(params, 1)
    if name == "torch":  # on a GPU it takes gradients alone that lie as their parameters do
        for p in params:
            p.grad = p.grad.contiguous()
    params[0].grad[5] = float("inf")
    before = copies(params)
    step(scaler, optimizer)
    assert scaler.get_scale() == SCALE / 2
    lists.assert_same_bits([p.grad for p in params], before)


TORCH = {
    "torch sgd": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "torch adamw": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
}
ALL = {**OPTIMIZERS, "lamb": lambda params: FusedMixedPrecisionLamb(params, lr=0.1), **TORCH}


@pytest.mark.parametrize("name", ALL)
def test_no_parameter_has_a_gradient(variant, name):
    """What the scaler found is then the number 0 and no tensor. The step moves nothing, and those that follow go on as
    after one without a scaler."""
    variant.mixed = name in TORCH
    idle, twins, busy = (parameters(variant.device, F32) for _ in range(3))
    optimizer, twin, other = (ALL[name](params) for params in (idle, twins, busy))
    scaler, before = scaler_for(variant.device), lists.clones([p.detach() for p in idle])
    give_gradients(busy, 1, as_parameters=name in TORCH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        scaler.step(other)  # update() wants to have looked at one gradient
    step(scaler, optimizer)
    twin.step()
    lists.assert_same_bits(idle, before)
    assert scaler.get_scale() == SCALE
    for params, each in ((idle, optimizer), (twins, twin)):
        give_gradients(params, 2, as_parameters=name in TORCH)
        step(scaler, each)
    lists.assert_same_bits(idle, twins)
    assert not torch.equal(idle[0], before[0])


@pytest.mark.parametrize("make", [torch.optim.SGD, FusedAdam, FusedLAMB])
def test_no_gradient_where_the_scaler_itself_skips(make):
    """As with any optimizer of torch that leaves that to the scaler."""
    params = parameters(torch.device("cpu"), F32)
    before = lists.clones([p.detach() for p in params])
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler_for(params[0].device).step(make(params, lr=0.1))
    lists.assert_same_bits(params, before)


def test_torch_leaves_them_unscaled():
    """What these tests go by."""
    params = parameters(torch.device("cpu"), F32)
    optimizer, scaler = torch.optim.Adam(params, fused=True), scaler_for(params[0].device)
    give_gradients(params, 1)
    expected = unscaled(copies(params))
    step(scaler, optimizer)
    for p, value in zip(params, expected, strict=True):  # it divides by the scale
        torch.testing.assert_close(p.grad, value, rtol=2**-22, atol=0)
