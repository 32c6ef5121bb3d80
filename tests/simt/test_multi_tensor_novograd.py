"""multi_tensor_novograd kernels against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import numpy as np
import pytest

from simt.tensor_lists import SIZES, TensorLists, check_unscaled

UNIT, ARGUMENTS = "multi_tensor_novograd", "NovogradArguments"
TYPES = [
    "f32_f32_f32", "f16_f32_f32", "bf16_f32_f32", "f16_f16_f32", "f16_f16_f16", "f32_f16_f32",
    "bf16_bf16_f32", "bf16_bf16_bf16", "f32_bf16_f32", "f64_f64_f64",
]  # fmt: skip
BETA1, BETA2 = 0.9, 0.98
SCALARS = dict(
    lr=0.1, beta1=BETA1, beta2=BETA2, one_minus_beta2=1 - BETA2, eps=1e-6, weight_decay=0.3,
    bias_correction=1, grad_averaging=1, step=3,
)  # fmt: skip
GRADIENT, PARAMETER, AVERAGE = range(3)
INSIDE, DECOUPLED = 0, 1
KINDS = {"norm": lambda x: np.sqrt((x * x).sum()), "maximum": lambda x: np.abs(x).max(initial=0)}
OLD = np.array([2.0, 5.0, -1.0, 0.5, 0.0, -1.0])  # averaged norms; -1: none yet


def _averaged(kind, gradients, old=OLD, beta2=BETA2):
    new = np.array([KINDS[kind](g) for g in gradients])
    if kind == "norm":
        return np.where(old < 0, new, np.sqrt(beta2 * old**2 + (1 - beta2) * new**2))
    return np.where(old < 0, new, beta2 * old + (1 - beta2) * new)


# ---- the first launch --------------------------------------------------------------------------------------


def _measure(device, lists, kind, norms, run=1, **changes):
    kernel = f"{kind}_{lists.types[0]}"
    gradients = lists.table().addresses
    values = SCALARS | dict(gradients=gradients, grad_norms=norms) | changes
    lists.launch(kernel, ARGUMENTS, UNIT, reductions=1, run=run, **values)


@pytest.mark.parametrize("run", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "f64"])
def test_norms_are_averaged(device, name, kind, run):
    lists = TensorLists(device, [name])
    norms = device.put(OLD.astype(np.float32))
    _measure(device, lists, kind, norms, run)
    np.testing.assert_allclose(norms.numpy(), _averaged(kind, lists.values[0]), rtol=1e-6)
    lists.check_untouched()


@pytest.mark.parametrize("kind", KINDS)
def test_betas_are_not_rounded_to_float(device, kind):
    """1 - float(0.999) is off by 1.3e-5, relative."""
    lists = TensorLists(device, ["f32"])
    norms = device.full(len(SIZES), 0.0)
    _measure(device, lists, kind, norms, beta2=0.999, one_minus_beta2=0.001)
    expected = _averaged(kind, lists.values[0], np.zeros(len(SIZES)), 0.999)
    np.testing.assert_allclose(norms.numpy(), expected, rtol=5e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_the_norm_of_a_missing_gradient_stays(device, kind):
    lists = TensorLists(device, ["f32"])
    lists.buffers[0][3] = None
    norms = device.put(OLD.astype(np.float32))
    _measure(device, lists, kind, norms)
    expected = _averaged(kind, lists.values[0])
    expected[3] = OLD[3]
    np.testing.assert_allclose(norms.numpy(), expected, rtol=1e-6)


def test_the_step_is_counted_once(device):
    lists = TensorLists(device, ["bf16"])
    step, norms = device.full(1, 6, np.int32), device.full(len(SIZES), -1)
    _measure(device, lists, "norm", norms, step_on_device=step, step_offset=1, advance_step=1)
    assert step.numpy()[0] == 7


def test_gradients_are_scaled(device):
    lists = TensorLists(device, ["f16"])
    norms = device.full(len(SIZES), -1)
    _measure(device, lists, "norm", norms, inv_scale=device.full(1, 0.125))
    np.testing.assert_allclose(norms.numpy(), [KINDS["norm"](g) / 8 for g in lists.values[0]], rtol=1e-6)


@pytest.mark.parametrize("flag", ["found_inf", "noop_flag"])
def test_a_flagged_launch_leaves_the_norms(device, flag):
    lists = TensorLists(device, ["f32"])
    step, norms = device.full(1, 6, np.int32), device.put(OLD.astype(np.float32))
    raised = device.full(1, 1, np.float32 if flag == "found_inf" else np.int32)
    _measure(
        device, lists, "norm", norms, step_on_device=step, step_offset=1, advance_step=1, **{flag: raised}
    )
    np.testing.assert_array_equal(norms.numpy(), OLD.astype(np.float32))
    assert step.numpy()[0] == 6


# ---- the second --------------------------------------------------------------------------------------------

NORMS = np.array([2.0, 5.0, 1.0, 0.5, 0.25, 3.0])


def _update(lists, **changes):
    kernel = "_".join(lists.types)
    norms = lists.device.put(NORMS.astype(np.float32))
    lists.launch(kernel, ARGUMENTS, UNIT, **(SCALARS | dict(grad_norms=norms) | changes))


def _expected(lists, moment_mode=INSIDE, inv_scale=1.0, **changes):
    """The step in float64: parameters, averages."""
    s = SCALARS | changes
    correct = s["bias_correction"]
    first = 1 - BETA1 ** s["step"] if correct else 1
    second = np.sqrt(1 - BETA2 ** s["step"]) if correct else 1
    parameters, averages = [], []
    for g, p, m, norm in zip(*lists.values, NORMS, strict=True):
        g, divisor = g * inv_scale, norm / second + s["eps"]
        if moment_mode == INSIDE:
            g = g / divisor + s["weight_decay"] * p
        averages.append(BETA1 * m + (1 - BETA1 if s["grad_averaging"] else 1) * g)
        update = averages[-1] / first
        if moment_mode == DECOUPLED:
            update = update / divisor + s["weight_decay"] * p
        parameters.append(p - s["lr"] * update)
    return parameters, averages


def _check(lists, **how):
    parameters, averages = _expected(lists, **how)
    math = "f64" if lists.types[PARAMETER] == "f64" else "f32"
    lists.check(PARAMETER, parameters, math, absolute=8)
    lists.check(AVERAGE, averages, math, absolute=8)
    lists.check_untouched([GRADIENT])


@pytest.mark.parametrize("moment_mode", [INSIDE, DECOUPLED], ids=["inside", "decoupled"])
@pytest.mark.parametrize("types", TYPES)
def test_step(device, types, moment_mode):
    lists = TensorLists(device, types.split("_"))
    _update(lists, moment_mode=moment_mode)
    _check(lists, moment_mode=moment_mode)


@pytest.mark.parametrize("moment_mode", [INSIDE, DECOUPLED], ids=["inside", "decoupled"])
@pytest.mark.parametrize("option", ["bias_correction", "grad_averaging"])
def test_options(device, option, moment_mode):
    lists = TensorLists(device, ["f32"] * 3)
    _update(lists, moment_mode=moment_mode, **{option: 0})
    _check(lists, moment_mode=moment_mode, **{option: 0})


def test_values_that_lie_on_the_device(device):
    lists = TensorLists(device, ["f16", "f32", "f32"])
    _update(
        lists, lr=99.0, lr_on_device=device.full(1, 0.25), inv_scale=device.full(1, 0.125), step=77,
        step_on_device=device.full(1, 6, np.int32), step_offset=1,
    )  # fmt: skip
    _check(lists, lr=0.25, inv_scale=0.125, step=7)


@pytest.mark.parametrize("flag", ["found_inf", "noop_flag"])
def test_a_flagged_step_changes_nothing(device, flag):
    lists = TensorLists(device, ["f32"] * 3)
    _update(lists, **{flag: device.full(1, 1, np.float32 if flag == "found_inf" else np.int32)})
    lists.check_untouched()


def test_a_tensor_without_gradient_is_left_out(device):
    lists = TensorLists(device, ["f32"] * 3)
    out = SIZES.index(1000)
    hidden, lists.buffers[GRADIENT][out] = lists.buffers[GRADIENT][out], None
    _update(lists)
    lists.buffers[GRADIENT][out] = hidden
    now, (parameters, _) = lists.now(), _expected(lists)
    for k in (PARAMETER, AVERAGE):
        np.testing.assert_array_equal(now[k][out], lists.values[k][out])
    np.testing.assert_allclose(now[PARAMETER][out + 1], parameters[out + 1], rtol=1e-6, atol=5e-7)


# ---- the launch that leaves gradients unscaled ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "f64"])
def test_gradients_are_left_unscaled(device, name):
    check_unscaled(device, "multi_tensor_novograd", "NovogradArguments", name, 0.125)
