"""Training is the same, bit for bit, whatever torch's default dtype and device are."""

from __future__ import annotations

import contextlib

import amp_runs as runs
import lists
import pytest
import torch
import variants
from lists import BF16, F16, F32, F64
from torch import nn
from torch_defaults import set_to

import apex.optimizers
from apex import amp
from apex.contrib.clip_grad import clip_grad_norm_
from apex.fp16_utils import FP16_Optimizer
from apex.parallel.LARC import LARC

SETTINGS = {
    "bfloat16": (BF16, "cpu"),
    "float16": (F16, "cpu"),
    "float64": (F64, "cpu"),
    "meta": (F32, "meta"),
}
SHAPES = ((1,), (7,), (33, 5), (4, 3, 2, 2))


def fused(name, dtypes=(F32, F16, BF16, F64), **options):
    """Three steps over parameters of several dtypes, the second scaled by a GradScaler's attributes."""

    def run():
        params = [nn.Parameter(t) for dtype in dtypes for t in lists.random(dtype, "cpu", SHAPES)]
        optimizer = getattr(apex.optimizers, name)(params, lr=0.1, **options)
        for step in range(3):
            gradients(params, step)
            if getattr(optimizer, "_step_supports_amp_scaling", False):
                optimizer.found_inf, optimizer.grad_scale = (
                    lists.scalar(step == 1, "cpu"),
                    lists.scalar(4.0, "cpu"),
                )
            optimizer.step()
        return params, optimizer.state_dict()

    return run


def gradients(params, step):
    for i, p in enumerate(params):
        (p.grad,) = lists.random(p.dtype, p.device, [p.shape], seed=100 * step + i)


def larc(dtype):
    def run():
        params = [nn.Parameter(t) for t in lists.random(dtype, "cpu", SHAPES)]
        optimizer = LARC(torch.optim.SGD(params, lr=0.1, weight_decay=0.1))
        gradients(params, 1)
        params[0].grad.zero_()
        optimizer.step()
        return params

    return run


def clip(norm_type, dtype, max_norm=1.0):
    def run():
        params = [nn.Parameter(t) for t in lists.random(dtype, "cpu", SHAPES)]
        nothing = clip_grad_norm_(params, max_norm, norm_type)
        gradients(params, 1)
        return clip_grad_norm_(params, max_norm, norm_type), [p.grad for p in params], nothing

    return run


def master_weights():
    model = [nn.Parameter(t) for t in lists.random(F16, "cpu", SHAPES)]
    optimizer = FP16_Optimizer(torch.optim.SGD(model, lr=0.1), dynamic_loss_scale=True, verbose=False)
    norms = []
    for step in range(3):
        loss = sum(
            (p * t).sum() for p, t in zip(model, lists.random(F16, "cpu", SHAPES, seed=step), strict=True)
        )
        optimizer.zero_grad()
        optimizer.backward(loss * (float("inf") if step == 1 else 1.0))
        norms.append(optimizer.clip_master_grads(1.0))
        optimizer.step()
    return model, norms, optimizer.state_dict()


def under_amp(name, level, **options):
    """Three steps, the second of which overflows, with combined gradients where `name` is of combined tensors."""

    def run():
        model = nn.ParameterList([nn.Parameter(t) for t in lists.random(F32, "cpu", SHAPES)])
        optimizer = getattr(apex.optimizers, name)(model.parameters(), lr=0.1, **options)
        runs.forget()
        model, optimizer = runs.initialize(model, optimizer, opt_level=level, loss_scale="dynamic")
        norms = []
        for step in range(3):
            targets = lists.random(F32, "cpu", SHAPES, seed=step)
            loss = sum((p.float() * t).sum() for p, t in zip(model, targets, strict=True))
            runs.backward(loss * (float("inf") if step == 1 else 1.0), optimizer)
            if name.startswith("Combined"):
                norms.append(optimizer.clip_optimizer_grad_norm_fused(1.0))
            optimizer.step()
            optimizer.zero_grad()
        state = amp.state_dict()
        runs.forget()
        return list(model), list(amp.master_params(optimizer)), norms, optimizer.state_dict(), dict(state)

    return run


RUNS = {
    "FusedAdam": fused("FusedAdam", weight_decay=0.1),
    "FusedAdam capturable": fused("FusedAdam", capturable=True),
    "FusedAdam master weights": fused("FusedAdam", dtypes=(F16, BF16), master_weights=True),
    "FusedAdam capturable master weights": fused("FusedAdam", (F16,), capturable=True, master_weights=True),
    "FusedSGD": fused("FusedSGD", momentum=0.9, weight_decay=0.1),
    "FusedLAMB": fused("FusedLAMB", dtypes=(F32, F16, BF16)),
    "FusedNovoGrad": fused("FusedNovoGrad", dtypes=(F32, F16)),
    "FusedNovoGrad capturable": fused("FusedNovoGrad", dtypes=(F32, F16), capturable=True, norm_type=0),
    "FusedAdagrad": fused("FusedAdagrad", weight_decay=0.1),
    "FusedLARS": fused("FusedLARS", momentum=0.9),
    "FusedMixedPrecisionLamb": fused("FusedMixedPrecisionLamb", dtypes=(BF16,), reduced_precision_dtype=BF16),
    "Lamb": fused("Lamb", dtypes=(F32, F64)),
    **{f"LARC {dtype}": larc(dtype) for dtype in (F32, F64, F16)},
    **{
        f"clip {norm} {dtype}": clip(norm, dtype)
        for norm in (1.0, 2.0, float("inf"))
        for dtype in (F32, F16, F64)
    },
    "FP16_Optimizer": master_weights,
    "FusedAdam O2": under_amp("FusedAdam", "O2"),
    "FusedSGD O5": under_amp("FusedSGD", "O5", momentum=0.9),
    "CombinedSGD O1": under_amp("CombinedSGD", "O1", momentum=0.9),
    "CombinedAdam O2": under_amp("CombinedAdam", "O2", amsgrad=True),
    "CombinedAdamW O1": under_amp("CombinedAdamW", "O1"),
    "CombinedAdamP O1": under_amp("CombinedAdamP", "O1", delta=3.0, weight_decay=0.1),
    "CombinedAdadelta O1": under_amp("CombinedAdadelta", "O1"),
    "CombinedBertAdam O1": under_amp("CombinedBertAdam", "O1", t_total=10, warmup=0.3, max_grad_norm=1.0),
    "CombinedLamb O1": under_amp("CombinedLamb", "O1", use_global_grad_norm=True),
    "CombinedRMSprop O2": under_amp("CombinedRMSprop", "O2", centered=True),
    "CombinedRMSpropTF O1": under_amp("CombinedRMSpropTF", "O1", momentum=0.9),
}


def flat(result, path=""):
    """[(where, value)] of nested results; tensors as (dtype, device, values)."""
    if isinstance(result, torch.Tensor):
        return [(path, result.dtype, result.device, result.detach().view(-1).tolist())]
    if isinstance(result, dict):
        return [row for key, value in result.items() for row in flat(value, f"{path}.{key}")]
    if isinstance(result, (list, tuple)):
        return [row for i, value in enumerate(result) for row in flat(value, f"{path}[{i}]")]
    return [(path, result)]


@pytest.mark.filterwarnings("ignore:FP16_Optimizer is of old")
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("variant", ["reference", "fastest"])
def test_training_is_the_same_under_every_default(name, variant):
    reference = variants.served_by("reference") if variant == "reference" else contextlib.nullcontext()
    with reference:
        with set_to(F32, "cpu"):
            expected = flat(RUNS[name]())
        for setting, how in SETTINGS.items():
            with set_to(*how):
                found = RUNS[name]()
            assert flat(found) == expected, setting
