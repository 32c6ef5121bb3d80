"""multi_tensor_amsgrad kernels against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import numpy as np
import pytest

from simt.multi_tensor import THREADS
from simt.structs import make
from simt.tensor_lists import GRID, TensorLists

TYPES = ["f32", "f64"]
SCALARS = dict(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-2, weight_decay=0.3, bias_correction=1)
GRADIENT, PARAMETER, MEAN, SQUARE, LARGEST = range(5)
L2, DECOUPLED = 0, 1


def _lists(device, kind="f32"):
    return TensorLists(device, [kind] * 5, positive=[SQUARE, LARGEST])


def _launch(lists, mode=L2, step=3, **changes):
    arguments = SCALARS | dict(mode=mode, step=step) | changes
    parameters = [lists.table(), make("AdamArguments", "multi_tensor_adam.h", **arguments)]
    lists.device.launch(f"multi_tensor_amsgrad_{'_'.join(lists.types)}", GRID, THREADS, parameters)


def _check(lists, mode=L2, step=3, lr=SCALARS["lr"], inv_scale=1.0):
    b1, b2, decay = SCALARS["beta1"], SCALARS["beta2"], SCALARS["weight_decay"]
    results = []
    for g, p, m, v, most in zip(*lists.values, strict=True):
        g = g * inv_scale + (decay * p if mode == L2 else 0)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        most = np.maximum(most, v)
        update = m / (1 - b1**step) / (np.sqrt(most / (1 - b2**step)) + SCALARS["eps"])
        p = p * (1 - lr * decay) if mode == DECOUPLED else p
        results.append((p - lr * update, m, v, most))
    for k, expected in enumerate(zip(*results, strict=True), start=PARAMETER):
        lists.check(k, list(expected), lists.types[k], absolute=8)
    lists.check_untouched([GRADIENT])


@pytest.mark.parametrize("mode", [L2, DECOUPLED], ids=["l2", "decoupled"])
@pytest.mark.parametrize("kind", TYPES)
def test_step(device, kind, mode):
    lists = _lists(device, kind)
    _launch(lists, mode)
    _check(lists, mode)


def test_values_that_lie_on_the_device(device):
    lists, steps = _lists(device), device.full(1, 4, np.int32)
    on_device = dict(
        lr_on_device=device.full(1, 0.25),
        inv_scale=device.full(1, 0.125),
        step_on_device=steps,
        step_offset=1,
        advance_step=1,
        blocks_done=device.full(1, 0, np.uint32),
    )
    _launch(lists, step=0, lr=99.0, **on_device)
    _check(lists, step=5, lr=0.25, inv_scale=0.125)
    assert steps.numpy()[0] == 5


@pytest.mark.parametrize("flag", ["found_inf", "noop_flag"])
def test_a_flagged_step_changes_nothing(device, flag):
    lists = _lists(device)
    _launch(lists, **{flag: device.full(1, 1, np.float32 if flag == "found_inf" else np.int32)})
    lists.check_untouched()
