"""multi_tensor_adagrad kernels against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import numpy as np
import pytest

from simt.tensor_lists import SIZES, TensorLists, check_unscaled

TYPES = [
    "f32_f32_f32", "f16_f32_f32", "bf16_f32_f32", "f16_f16_f32", "f16_f16_f16", "f32_f16_f32",
    "bf16_bf16_f32", "bf16_bf16_bf16", "f32_bf16_f32", "f64_f64_f64",
]  # fmt: skip
SCALARS = dict(lr=0.1, eps=1e-6, weight_decay=0.3)
GRADIENT, PARAMETER, SUM = range(3)
L2, DECOUPLED = 0, 1


def _lists(device, types):
    return TensorLists(device, types.split("_"), positive=[SUM])


def _launch(lists, mode=L2, **changes):
    kernel = "_".join(lists.types)
    lists.launch(kernel, "AdagradArguments", "multi_tensor_adagrad", mode=mode, **(SCALARS | changes))


def _expected(lists, mode=L2, lr=SCALARS["lr"], inv_scale=1.0):
    """The paper's step in float64: parameters, sums."""
    parameters, sums = [], []
    for g, p, h in zip(*lists.values, strict=True):
        g = g * inv_scale + (SCALARS["weight_decay"] * p if mode == L2 else 0)
        sums.append(h + g * g)
        decay = SCALARS["weight_decay"] * p if mode == DECOUPLED else 0
        parameters.append(p - lr * (g / (np.sqrt(sums[-1]) + SCALARS["eps"]) + decay))
    return parameters, sums


def _check(lists, **how):
    parameters, sums = _expected(lists, **how)
    math = "f64" if lists.types[PARAMETER] == "f64" else "f32"
    lists.check(PARAMETER, parameters, math)
    lists.check(SUM, sums, math)
    lists.check_untouched([GRADIENT])


@pytest.mark.parametrize("mode", [L2, DECOUPLED], ids=["l2", "decoupled"])
@pytest.mark.parametrize("types", TYPES)
def test_step(device, types, mode):
    lists = _lists(device, types)
    _launch(lists, mode)
    _check(lists, mode=mode)


def test_values_that_lie_on_the_device(device):
    lists = _lists(device, "f16_f32_f32")
    _launch(lists, lr=99.0, lr_on_device=device.full(1, 0.25), inv_scale=device.full(1, 0.125))
    _check(lists, lr=0.25, inv_scale=0.125)


@pytest.mark.parametrize("flag", ["found_inf", "noop_flag"])
def test_a_flagged_step_changes_nothing(device, flag):
    lists = _lists(device, "f32_f32_f32")
    _launch(lists, **{flag: device.full(1, 1, np.float32 if flag == "found_inf" else np.int32)})
    lists.check_untouched()


def test_a_tensor_without_gradient_is_left_out(device):
    lists = _lists(device, "f32_f32_f32")
    out = SIZES.index(1000)
    hidden, lists.buffers[GRADIENT][out] = lists.buffers[GRADIENT][out], None
    _launch(lists)
    lists.buffers[GRADIENT][out] = hidden
    now, (parameters, _) = lists.now(), _expected(lists)
    for k in (PARAMETER, SUM):
        np.testing.assert_array_equal(now[k][out], lists.values[k][out])
    np.testing.assert_allclose(now[PARAMETER][out + 1], parameters[out + 1], rtol=1e-6, atol=2e-7)


# ---- the launch that leaves gradients unscaled ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "f64"])
def test_gradients_are_left_unscaled(device, name):
    check_unscaled(device, "multi_tensor_adagrad", "AdagradArguments", name, 0.125)
