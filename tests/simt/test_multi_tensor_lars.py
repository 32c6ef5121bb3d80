"""multi_tensor_lars kernels against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import numpy as np
import pytest

from simt.tensor_lists import SIZES, TensorLists, check_unscaled

UNIT, ARGUMENTS = "multi_tensor_lars", "LarsArguments"
PAIRS = ["f32_f32", "f16_f32", "bf16_f32", "f16_f16", "f32_f16", "bf16_bf16", "f32_bf16", "f64_f64"]
TYPES = [
    "f32_f32_f32", "f16_f32_f32", "bf16_f32_f32", "f16_f16_f32", "f16_f16_f16", "f32_f16_f32",
    "f32_f16_f16", "bf16_bf16_f32", "bf16_bf16_bf16", "f32_bf16_f32", "f32_bf16_bf16", "f64_f64_f64",
]  # fmt: skip
MODEL = ["f16_f32_f32_f16", "f32_f32_f32_f16", "bf16_f32_f32_bf16", "f32_f32_f32_bf16", "bf16_f32_f32_f16"]
SCALARS = dict(
    lr=2.0, trust_coefficient=0.1, eps=0.01, weight_decay=0.3, momentum=0.9, scale=0.5, tensors=len(SIZES)
)
GRADIENT, PARAMETER, BUFFER, COPY = range(4)


def _norms(arrays, scale=1.0):
    return np.array([np.sqrt(np.square(a * scale).sum()) for a in arrays])


def _expected(lists, nesterov=0, is_skipped=0, norms=None, **changes):
    """Public apex's step in float64: parameters, buffers. norms: of gradients, of parameters."""
    s = SCALARS | changes
    g_norms, p_norms = norms or (_norms(lists.values[GRADIENT], s["scale"]), _norms(lists.values[PARAMETER]))
    parameters, buffers = [], []
    for g, p, m, g_norm, p_norm in zip(*lists.values[:3], g_norms, p_norms, strict=True):
        size = s["lr"]
        if not is_skipped and g_norm > 0 and p_norm > 0:
            size *= s["trust_coefficient"] * p_norm / (g_norm + s["weight_decay"] * p_norm + s["eps"])
        step = size * (s["scale"] * g + s["weight_decay"] * p)
        buffers.append(s["momentum"] * m - step)
        parameters.append(p + (s["momentum"] * buffers[-1] - step if nesterov else buffers[-1]))
    return parameters, buffers


def _check(lists, **how):
    parameters, buffers = _expected(lists, **how)
    math = "f64" if lists.types[PARAMETER] == "f64" else "f32"
    lists.check(PARAMETER, parameters, math, absolute=8)
    lists.check(BUFFER, buffers, math, absolute=8)
    if len(lists.types) > 3:
        lists.check_rounded_copy(COPY, PARAMETER)
    lists.check_untouched([GRADIENT])


def _measure(lists, run=1, **changes):
    """The first launch, on the first two lists: its scratch."""
    pair = TensorLists(lists.device, lists.types[:2])  # the same seed: the same values
    values = SCALARS | changes
    return pair.launch(f"norms_{'_'.join(pair.types)}", ARGUMENTS, UNIT, reductions=2, run=run, **values)


def _update(lists, **changes):
    lists.launch("_".join(lists.types), ARGUMENTS, UNIT, **(SCALARS | changes))


@pytest.mark.parametrize("run", [1, 2])
@pytest.mark.parametrize("types", PAIRS)
def test_both_launches(device, types, run):
    gradient, parameter = types.split("_")
    lists = TensorLists(device, [gradient, parameter, "f64" if parameter == "f64" else "f32"])
    scratch = _measure(lists, run)
    _update(lists, totals=scratch.totals)
    _check(lists)


@pytest.mark.parametrize("nesterov", [0, 1])
@pytest.mark.parametrize("types", TYPES + MODEL)
def test_update(device, types, nesterov):
    """With norms from elsewhere."""
    lists = TensorLists(device, types.split("_"))
    norms = [np.linspace(*ends, len(SIZES), dtype=np.float32).astype(float) for ends in ((0.5, 3), (4, 1))]
    g_norms, p_norms = (device.put(n.astype(np.float32)) for n in norms)
    _update(lists, nesterov=nesterov, grad_norms=g_norms, param_norms=p_norms)
    _check(lists, nesterov=nesterov, norms=norms)


@pytest.mark.parametrize("zero", ["gradient", "parameter"])
def test_where_a_norm_is_zero(device, zero):
    """The learning rate stands as it is: a fresh layer of zeros moves."""
    lists = TensorLists(device, ["f32"] * 3)
    norms = [np.ones(len(SIZES)), np.ones(len(SIZES))]
    norms[zero == "parameter"][2:4] = 0
    g_norms, p_norms = (device.put(n.astype(np.float32)) for n in norms)
    _update(lists, grad_norms=g_norms, param_norms=p_norms)
    _check(lists, norms=norms)


def test_one_learning_rate_for_all(device):
    lists = TensorLists(device, ["bf16", "bf16", "f32"])
    _update(lists, is_skipped=1, lr=0.1)
    _check(lists, is_skipped=1, lr=0.1)


def test_values_that_lie_on_the_device(device):
    lists = TensorLists(device, ["f16", "f32", "f32"])
    scale = dict(inv_scale=device.full(1, 0.125))
    scratch = _measure(lists, **scale)
    _update(lists, totals=scratch.totals, lr=99.0, lr_on_device=device.full(1, 0.25), **scale)
    _check(lists, lr=0.25, scale=0.0625)


@pytest.mark.parametrize("flag", ["found_inf", "noop_flag"])
def test_a_flagged_step_changes_nothing(device, flag):
    raised = device.full(1, 1, np.float32 if flag == "found_inf" else np.int32)
    lists = TensorLists(device, ["f32", "f32", "f32", "f16"])
    scratch = _measure(lists, **{flag: raised})
    _update(lists, totals=scratch.totals, **{flag: raised})
    lists.check_untouched()


def test_a_tensor_without_gradient_is_left_out(device):
    lists = TensorLists(device, ["f32", "f32", "f32", "f16"])
    out = SIZES.index(1000)
    hidden, lists.buffers[GRADIENT][out] = lists.buffers[GRADIENT][out], None
    _update(lists, totals=_measure(lists).totals)
    lists.buffers[GRADIENT][out] = hidden
    now, (parameters, _) = lists.now(), _expected(lists)
    for k in (PARAMETER, BUFFER, COPY):
        np.testing.assert_array_equal(now[k][out], lists.values[k][out])
    np.testing.assert_allclose(now[PARAMETER][out + 1], parameters[out + 1], rtol=1e-6, atol=5e-7)


# ---- the launch that leaves gradients unscaled ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "f64"])
def test_gradients_are_left_unscaled(device, name):
    check_unscaled(device, "multi_tensor_lars", "LarsArguments", name, 0.0625, scale=0.5)
