"""model.double(), .half(), .bfloat16() between steps: every optimizer goes on, with its states.

torch's do, where their formula lets them (SGD, Adagrad, RMSprop; Adam's in-place lerp refuses).
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch_defaults import float32_on_cpu

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
    Lamb,
)
from apex.parallel.LARC import LARC

OPTIMIZERS = {
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01, weight_decay=0.1),
    "FusedAdam of torch's kind": lambda params: FusedAdam(params, lr=0.01, adam_w_mode=False, weight_decay=0.1),
    "FusedAdam capturable": lambda params: FusedAdam(params, lr=0.01, capturable=True),
    "FusedAdam with masters": lambda params: FusedAdam(params, lr=0.01, master_weights=True),
    "FusedAdagrad": lambda params: FusedAdagrad(params, lr=0.01),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=0.01),
    "FusedLARS": lambda params: FusedLARS(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "FusedMixedPrecisionLamb": lambda params: FusedMixedPrecisionLamb(params, lr=0.01),
    "FusedMixedPrecisionLamb of half": lambda params: FusedMixedPrecisionLamb(
        params, lr=0.01, reduced_precision_dtype=torch.float16
    ),
    "FusedNovoGrad": lambda params: FusedNovoGrad(params, lr=0.01),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.1),
    "FusedSGD with momentum": lambda params: FusedSGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Lamb": lambda params: Lamb(params, lr=0.01),
    "LARC of FusedSGD": lambda params: LARC(FusedSGD(params, lr=0.1, momentum=0.9)),
}  # fmt: skip
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
TOLERANCE = {F16: 4e-3, BF16: 3e-2, F32: 2e-6, F64: 2e-6}  # the first steps were in float32


def make(dtype):
    with float32_on_cpu():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3)).to(dtype)


def steps(model, optimizer, seeds):
    """Steps by gradients that are the same in every dtype."""
    for seed in seeds:
        generator = torch.Generator("cpu").manual_seed(seed)
        for p in model.parameters():
            values = torch.randint(-8, 9, p.shape, generator=generator, dtype=torch.int64, device="cpu")
            p.grad = values.div(4).to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize("dtypes", [(F32, F64), (F32, F16), (F32, BF16), (F64, F32), (F64, F16), (F16, F32), (F16, F64),
                                    (F16, BF16), (BF16, F16), (F32, F64, F32, F16)])  # fmt: skip
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on(name, dtypes):
    """With the values of a run that was in float64 from its first step, to the accuracy of the coarsest dtype."""
    model, exact = make(dtypes[0]), make(dtypes[0]).double()
    optimizer, oracle = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](exact.parameters())
    for i, dtype in enumerate(dtypes):
        model.to(dtype)
        steps(model, optimizer, range(3 * i, 3 * i + 3))
    steps(exact, oracle, range(3 * len(dtypes)))
    tolerance = max(TOLERANCE[dtype] for dtype in dtypes)
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        assert p.dtype == dtypes[-1]
        torch.testing.assert_close(p.double(), q, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "Lamb" and "LARC" not in name])
def test_states_are_float64_exactly_where_parameters_are(name):
    """A new optimizer would have them so, and one that continues a checkpoint."""
    model = make(F32)
    optimizer = OPTIMIZERS[name](model.parameters())
    for dtype in (F32, F64, F16, F64):
        model.to(dtype)
        steps(model, optimizer, (1, 2))
        for p in model.parameters():
            for state in ("exp_avg", "exp_avg_sq", "sum", "momentum_buffer", "master_param"):
                tensor = optimizer.state[p].get(state)  # a float64 parameter is its own master
                assert tensor is None or (tensor.dtype == F64) == (dtype == F64), (state, dtype, tensor.dtype)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_as_a_checkpoint_that_is_loaded_into_the_cast_model(name):
    model = make(F32)
    optimizer = OPTIMIZERS[name](model.parameters())
    steps(model, optimizer, range(3))
    saved, other = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model).double()
    model.double()
    loaded = OPTIMIZERS[name](other.parameters())
    loaded.load_state_dict(saved)
    for m, o in ((model, optimizer), (other, loaded)):
        steps(m, o, range(3, 6))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-7)


def test_masters_of_a_dtype_before_do_not_come_back():
    """half, float32, half again: what was trained in between was lost."""
    model = make(F16)
    optimizer = OPTIMIZERS["FusedMixedPrecisionLamb of half"](model.parameters())
    steps(model, optimizer, (0,))
    model.float()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(4.0)
    steps(model, optimizer, (1,))
    model.half()
    steps(model, optimizer, (2,))
    assert all(p.gt(3.5).all() for p in model.parameters())


def test_clipping_and_fp16_utils_go_on():
    model = make(F32)
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    for dtype in (F32, F64, F16):
        model.to(dtype)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        norm = clip_grad_norm_(model.parameters(), 1.0)
        assert norm.item() == pytest.approx(sum(p.numel() for p in model.parameters()) ** 0.5, rel=1e-3)
        optimizer.step()
    wrapped = FP16_Optimizer(FusedSGD(model.parameters(), lr=0.1, momentum=0.9), verbose=False)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    wrapped.update_master_grads()
    wrapped.step()
