"""multi_tensor_adadelta kernels against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import numpy as np
import pytest

from simt.tensor_lists import TensorLists

TYPES = ["f32", "f64"]
SCALARS = dict(lr=0.5, rho=0.9, eps=1e-2, weight_decay=0.3)
GRADIENT, PARAMETER, SQUARE, DELTA = range(4)


def _lists(device, kind="f32"):
    return TensorLists(device, [kind] * 4, positive=[SQUARE, DELTA])


def _launch(lists, **changes):
    lists.launch("_".join(lists.types), "AdadeltaArguments", "multi_tensor_adadelta", **(SCALARS | changes))


def _check(lists, lr=SCALARS["lr"], inv_scale=1.0):
    """The paper's step in float64."""
    rho, eps = SCALARS["rho"], SCALARS["eps"]
    results = []
    for g, p, s, a in zip(*lists.values, strict=True):
        g = g * inv_scale + SCALARS["weight_decay"] * p
        s = rho * s + (1 - rho) * g * g
        d = np.sqrt(a + eps) / np.sqrt(s + eps) * g
        results.append((p - lr * d, s, rho * a + (1 - rho) * d * d))
    for k, expected in enumerate(zip(*results, strict=True), start=PARAMETER):
        lists.check(k, list(expected), lists.types[k], absolute=8)
    lists.check_untouched([GRADIENT])


@pytest.mark.parametrize("kind", TYPES)
def test_step(device, kind):
    lists = _lists(device, kind)
    _launch(lists)
    _check(lists)


def test_values_that_lie_on_the_device(device):
    lists = _lists(device)
    _launch(lists, lr=99.0, lr_on_device=device.full(1, 0.25), inv_scale=device.full(1, 0.125))
    _check(lists, lr=0.25, inv_scale=0.125)


@pytest.mark.parametrize("flag", ["found_inf", "noop_flag"])
def test_a_flagged_step_changes_nothing(device, flag):
    lists = _lists(device)
    _launch(lists, **{flag: device.full(1, 1, np.float32 if flag == "found_inf" else np.int32)})
    lists.check_untouched()
