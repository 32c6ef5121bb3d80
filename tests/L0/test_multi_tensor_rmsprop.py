"""multi_tensor_rmsprop against float64, by every entrance and on everything that can serve it.

Tolerance: one rounding to each output's dtype, some of the arithmetic's, and a little of the terms' size (they are
near 1), because sums may cancel.
"""

from __future__ import annotations

import lists
import pytest
import torch
from lists import F32, F64, flag, scalar

from apex._loader import bindings

SCALARS = dict(lr=0.1, alpha=0.9, eps=1e-1, weight_decay=0.3)
TORCHS = dict(eps_inside=False, decoupled_decay=False, lr_in_momentum=False)
FORMS = [TORCHS, *({**TORCHS, name: True} for name in TORCHS), dict.fromkeys(TORCHS, True)]
CENTERED = [False, True]
MOMENTUM = [0.0, 0.9]


dispatcher, multi_tensor_rmsprop = lists.entrances("multi_tensor_rmsprop")


def state(device, dtype=F32, shapes=lists.FEW, centered=True, momentum=0.9):
    """[gradients, parameters, squares, averages, buffers] in the middle of a run; the last two may lack."""
    g, p, mean, buffer = (lists.random(dtype, device, shapes, seed=k) for k in range(4))
    squares = [1 + m.square() for m in mean]
    return [g, p, squares, mean if centered else [], buffer if momentum else []]


def expected(tensors, factor=1.0, **changes):
    """[parameters, averages of squares, averages, buffers] after the step, in float64."""
    s = SCALARS | TORCHS | changes
    exact = [lists.exact(column) for column in tensors]
    results = [[], [], [], []]
    for i, (g, p, square) in enumerate(zip(*exact[:3], strict=True)):
        g = g * factor + (0 if s["decoupled_decay"] else s["weight_decay"] * p)
        p = p * (1 - s["weight_decay"]) if s["decoupled_decay"] else p
        square = s["alpha"] * square + (1 - s["alpha"]) * g * g
        results[1].append(square)
        if exact[3]:
            mean = s["alpha"] * exact[3][i] + (1 - s["alpha"]) * g
            results[2].append(mean)
            square = square - mean * mean
        step = g / ((square + s["eps"]).sqrt() if s["eps_inside"] else square.sqrt() + s["eps"])
        if s["momentum"]:
            step = s["momentum"] * exact[4][i] + (s["lr"] * step if s["lr_in_momentum"] else step)
            results[3].append(step)
        results[0].append(p - (step if s["momentum"] and s["lr_in_momentum"] else s["lr"] * step))
    return results


def run(op, tensors, factor=1.0, wanted=None, **options):
    """One step, compared. factor: of gradients. wanted: what the oracle is told beside the options."""
    values = expected(tensors, factor, **(options | (wanted or {})))
    gradients = lists.clones(tensors[0])
    op(tensors, **(SCALARS | options))
    lists.assert_same_bits(tensors[0], gradients)
    for found, value in zip(tensors[1:], values, strict=True):
        working = lists.ROUNDING[tensors[1][0].dtype]
        lists.assert_near(found, value, arithmetic=64, smallest=64 * working)


@pytest.mark.parametrize("momentum", MOMENTUM)
@pytest.mark.parametrize("centered", CENTERED, ids=["plain", "centered"])
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_values(variant, multi_tensor_rmsprop, dtype, centered, momentum):
    tensors = state(variant.device, dtype, centered=centered, momentum=momentum)
    run(multi_tensor_rmsprop, tensors, momentum=momentum)
    if variant.simt:
        assert sum(n for name, n in variant.kernels.items() if "rmsprop" in name) == 1


def test_large_tensors(variant):
    run(dispatcher, state(variant.device, F32, lists.SHAPES), momentum=0.9)


@pytest.mark.parametrize("momentum", MOMENTUM)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: " ".join(name for name in form if form[name]))
def test_forms(variant, form, momentum):
    run(dispatcher, state(variant.device, momentum=momentum), momentum=momentum, **form)


def test_without_decay(variant):
    run(dispatcher, state(variant.device), momentum=0.9, weight_decay=0.0)


def test_misaligned_views(variant, multi_tensor_rmsprop):
    for k in range(5):
        tensors = state(variant.device)
        tensors[k] = lists.misaligned(tensors[k])
        run(multi_tensor_rmsprop, tensors, momentum=0.9)


def test_scalars_on_the_device(variant, multi_tensor_rmsprop):
    options = dict(lr_tensor=scalar(0.25, variant.device), inv_scale=scalar(0.125, variant.device))
    run(
        multi_tensor_rmsprop,
        state(variant.device),
        0.125,
        wanted=dict(lr=0.25),
        lr=99.0,
        momentum=0.9,
        **options,
    )


@pytest.mark.parametrize("what", ["found_inf", "noop_flag"])
def test_a_flagged_step_changes_nothing(variant, multi_tensor_rmsprop, what):
    raised = scalar(1.0, variant.device) if what == "found_inf" else flag(variant.device, 1)
    down = scalar(0.0, variant.device) if what == "found_inf" else flag(variant.device)
    tensors = state(variant.device)
    before = [lists.clones(column) for column in tensors]
    multi_tensor_rmsprop(tensors, **(SCALARS | {what: raised, "momentum": 0.9}))
    for column, old in zip(tensors, before, strict=True):
        lists.assert_same_bits(column, old)
    run(multi_tensor_rmsprop, tensors, momentum=0.9, **{what: down})


def test_bad_input_raises_before_anything_runs(variant, multi_tensor_rmsprop):
    if not bindings.load().native:
        pytest.skip(f"the reference alone does not check its input: {bindings.load().reason}")
    tensors = state(variant.device)
    before = [lists.clones(column) for column in tensors]
    cases = [
        (TypeError, "no variant takes", [[t.double() for t in tensors[0]], *tensors[1:]], {}),
        (ValueError, "grad_avgs holds 1", [*tensors[:3], tensors[3][:1], tensors[4]], {}),
        (ValueError, "momentum buffers are required, for momentum 0.9", [*tensors[:4], []], {}),
        (TypeError, "lr_tensor must be a Float", tensors, {"lr_tensor": scalar(1.0, variant.device, F64)}),
    ]
    for error, words, columns, changes in cases:
        with pytest.raises(error, match=words):
            multi_tensor_rmsprop(columns, momentum=0.9, **(SCALARS | changes))
    for column, old in zip(tensors, before, strict=True):
        lists.assert_same_bits(column, old)


def test_opcheck():
    bindings.load()
    tensors = state("cpu", F32, ((3,), (2, 5)))
    options = SCALARS | dict(momentum=0.9, noop_flag=flag("cpu"))
    torch.library.opcheck(torch.ops.apex.multi_tensor_rmsprop.default, tuple(tensors), options)
