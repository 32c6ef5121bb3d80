"""multi_tensor_reversible_adam kernels against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import numpy as np
import pytest

from simt.element_types import encode
from simt.tensor_lists import TensorLists

SCALARS = dict(step_size=0.25, beta1=0.875, beta2=0.75, eps=0.125, weight_decay=0.5, scale=4.0)
GRADIENT, PARAMETER, AVERAGE, SQUARE, COPY = range(5)
UNIT = "multi_tensor_reversible_adam"


def _lists(device, kind, copy=None, spoiled=False):
    own = "f64" if kind == "f64" else "f32"
    lists = TensorLists(device, [kind, own, own, own, *([copy] if copy else [])], positive=[SQUARE])
    if spoiled:
        arrays = [np.array(values) for values in lists.values[GRADIENT]]
        for array in arrays[2:]:
            array[[0, -1]] = np.inf, np.nan
        lists.replace(GRADIENT, [encode(array, kind) for array in arrays])
    return lists


def _launch(lists, form, name, **changes):
    lists.launch(f"{form}_{name}", "ReversibleAdamArguments", UNIT, **(SCALARS | changes))


def _divisor(v, inside):
    return np.sqrt(v + SCALARS["eps"]) if inside else np.sqrt(v) + SCALARS["eps"]


def _check(lists, inside=False, skip=False):
    s, results = SCALARS, []
    for g, p, m, v in zip(*lists.values[:4], strict=True):
        g = g / s["scale"]
        keep = ~np.isfinite(g) & skip
        m2 = s["beta1"] * m + (1 - s["beta1"]) * g
        v2 = s["beta2"] * v + (1 - s["beta2"]) * g * g
        p2 = p - s["step_size"] * (m2 / _divisor(v2, inside) + s["weight_decay"] * p)
        results.append([np.where(keep, *pair) for pair in ((p, p2), (m, m2), (v, v2))])
    for k, wanted in enumerate(zip(*results, strict=True), start=PARAMETER):
        lists.check(k, list(wanted), lists.types[PARAMETER], absolute=8)
    if len(lists.types) > COPY:
        lists.check_rounded_copy(COPY, PARAMETER)


@pytest.mark.parametrize("inside", [0, 1])
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "f64"])
def test_step(device, kind, inside):
    lists = _lists(device, kind)
    _launch(lists, "step", kind, eps_inside_sqrt=inside)
    _check(lists, inside)
    lists.check_untouched([GRADIENT])


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_copies(device, kind):
    lists = _lists(device, kind, copy=kind)
    _launch(lists, "copy", f"{kind}_{kind}")
    _check(lists)


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_what_is_not_finite_stays_and_raises_the_flag(device, kind):
    for spoiled in (False, True):
        lists, flag = _lists(device, kind, copy=kind, spoiled=spoiled), device.full(1, 0, np.int32)
        _launch(lists, "copy", f"{kind}_{kind}", skip_non_finite=1, overflow_flag=flag)
        _check(lists, skip=True)
        assert flag.numpy()[0] == spoiled


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "f64"])
def test_undo(device, kind):
    lists = _lists(device, kind, spoiled=True)
    _launch(lists, "step", kind, skip_non_finite=1)
    stepped = lists.now()
    _launch(lists, "undo", kind, overflow_flag=device.full(1, 0, np.int32))
    for k in (PARAMETER, AVERAGE, SQUARE):
        for a, b in zip(lists.now()[k], stepped[k], strict=True):
            np.testing.assert_array_equal(a, b)
    _launch(lists, "undo", kind, overflow_flag=device.full(1, 1, np.int32))
    for k in (PARAMETER, AVERAGE, SQUARE):
        lists.check(k, lists.values[k], lists.types[k], arithmetic=64, absolute=256)
        assert k != SQUARE or all((a >= 0).all() for a in lists.now()[k])
