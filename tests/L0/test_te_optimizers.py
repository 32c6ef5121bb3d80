"""te.optimizers: the public engine's names, and weights that are kept in FP8 alone."""

from __future__ import annotations

import copy

import pytest
import torch
from te_common import (
    DEVICES,
    clean,  # noqa: F401  a fixture
    random,
)

import apex.optimizers
import apex.transformer_engine.pytorch as te
from apex._legacy import amp_C
from apex.transformer_engine.pytorch import optimizers

pytestmark = pytest.mark.usefixtures("clean")
F32, BF16 = torch.float32, torch.bfloat16
ON = pytest.mark.parametrize("device", DEVICES)
OPTIONS = dict(lr=0.05, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6)


def layer(device, dtype=F32, **options):
    with te.fp8_model_init(**options):
        return te.Linear(32, 48, params_dtype=dtype, device=device)


@pytest.mark.parametrize("preserve", [False, True])
@pytest.mark.parametrize(
    ("device", "capturable"),
    [("cpu", False), *(pytest.param("cuda", kind, marks=pytest.mark.gpu) for kind in (False, True))],
)
def test_weights_in_fp8(device, preserve, capturable):
    """They are the casts of masters, which go the way of torch's AdamW."""
    made, plain = layer(device, preserve_high_precision_init_val=preserve), te.Linear(32, 48, device=device)
    plain.load_state_dict(made.state_dict())
    if preserve:
        plain.weight.data.copy_(made.weight.get_high_precision_init_val())
    own = optimizers.FusedAdam(made.parameters(), master_weights=True, capturable=capturable, **OPTIONS)
    torchs = torch.optim.AdamW(plain.parameters(), **OPTIONS)
    for seed in range(4):
        own.zero_grad()
        made(random(8, 32, seed=seed, device=device)).square().sum().backward()
        for p, q in zip(plain.parameters(), made.parameters(), strict=True):
            p.grad = q.grad.clone()
        own.step()
        torchs.step()
        master = own.state[made.weight]["master_param"]
        assert torch.allclose(master, plain.weight, atol=1e-6) and torch.allclose(
            made.bias, plain.bias, atol=1e-6
        )
        assert type(made.weight) is te.Float8Tensor
        step = 2.0**-4 * plain.weight.abs() + 2.0**-7 * plain.weight.abs().max()
        assert ((made.weight.dequantize() - master).abs() <= step).all()
        if seed == 1:  # a checkpoint goes on
            again = copy.deepcopy(made)
            others = optimizers.FusedAdam(
                again.parameters(), master_weights=True, capturable=capturable, **OPTIONS
            )
            others.load_state_dict(own.state_dict())
            made, own = again, others


def test_weights_in_fp8_need_masters():
    made = layer("cpu")
    made(random(4, 32)).sum().backward()
    before = made.weight.dequantize()
    with pytest.raises(TypeError, match="master_weights=True"):
        optimizers.FusedAdam(made.parameters()).step()
    assert torch.equal(made.weight.dequantize(), before)


def test_parameters_without_a_gradient_stay():
    made, other = layer("cpu"), layer("cpu")
    own = optimizers.FusedAdam([*made.parameters(), *other.parameters()], master_weights=True, lr=0.1)
    made(random(4, 32)).sum().backward()
    before = other.weight._data.clone()
    own.step()
    assert torch.equal(other.weight._data, before) and own.state[other.weight] == {}


@ON
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_the_same_as_apex_s(device, dtype):
    """Bit for bit, of weights that are none of FP8."""
    pairs = [
        [
            random(5, 7, dtype=dtype, device=device, grad=True),
            random(3, seed=1, dtype=dtype, device=device, grad=True),
        ]
        for _ in range(2)
    ]
    master = dtype == BF16
    own = optimizers.FusedAdam(pairs[0], master_weights=master, store_param_remainders=master, **OPTIONS)
    other = apex.optimizers.FusedAdam(pairs[1], master_weights=master, **OPTIONS)
    for seed in range(3):
        for params in pairs:
            for p in params:
                p.grad = random(*p.shape, seed=seed, dtype=dtype, device=device)
        own.step()
        other.step()
    assert all(map(torch.equal, *pairs))
    assert own.defaults == other.defaults and list(own.state_dict()["state"][0]) == list(
        other.state_dict()["state"][0]
    )


def test_names():
    assert optimizers.FusedSGD is apex.optimizers.FusedSGD
    assert optimizers.multi_tensor_scale is amp_C.multi_tensor_scale
    assert optimizers.fused_adam.FusedAdam is optimizers.FusedAdam
    with pytest.raises(RuntimeError, match="AMSGrad"):
        optimizers.FusedAdam([random(2, grad=True)], amsgrad=True)
    for option in ("master_weight_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        with pytest.raises(NotImplementedError, match=option):
            optimizers.FusedAdam([random(2, grad=True)], **{option: torch.float16})
    parameter = random(2, grad=True)
    with pytest.raises(NotImplementedError, match="master_weights is True or False, not list"):
        optimizers.FusedAdam([parameter], master_weights=[parameter.detach().clone()])
    with pytest.raises(NotImplementedError, match="use_decoupled_grad"):
        optimizers.FusedAdam([random(2, grad=True)], use_decoupled_grad=True)
