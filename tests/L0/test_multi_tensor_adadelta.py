"""multi_tensor_adadelta against float64, by every entrance and on everything that can serve it.

Tolerance: one rounding to each output's dtype, some of the arithmetic's, and a little of the terms' size (they are
near 1), because sums may cancel.
"""

from __future__ import annotations

import lists
import pytest
import torch
from lists import F32, F64, flag, scalar

from apex._loader import bindings

SCALARS = dict(lr=0.5, rho=0.9, eps=1e-2, weight_decay=0.3)


dispatcher, multi_tensor_adadelta = lists.entrances("multi_tensor_adadelta")


def state(device, dtype=F32, shapes=lists.FEW):
    """[gradients, parameters, averages of squares, averages of squared updates] in the middle of a run."""
    tensors = [lists.random(dtype, device, shapes, seed=k) for k in range(4)]
    return [*tensors[:2], *([x.square() for x in column] for column in tensors[2:])]


def expected(tensors, factor=1.0, **changes):
    s = SCALARS | changes
    results = []
    for g, p, v, a in zip(*map(lists.exact, tensors), strict=True):
        g = g * factor + s["weight_decay"] * p
        v = s["rho"] * v + (1 - s["rho"]) * g * g
        d = (a + s["eps"]).sqrt() / (v + s["eps"]).sqrt() * g
        results.append((p - s["lr"] * d, v, s["rho"] * a + (1 - s["rho"]) * d * d))
    return [list(column) for column in zip(*results, strict=True)]


def run(op, tensors, factor=1.0, wanted=None, **options):
    """One step, compared. factor: of gradients. wanted: what the oracle is told beside the options."""
    values = expected(tensors, factor, **(options | (wanted or {})))
    gradients = lists.clones(tensors[0])
    op(tensors, **(SCALARS | options))
    lists.assert_same_bits(tensors[0], gradients)
    for found, value in zip(tensors[1:], values, strict=True):
        working = lists.ROUNDING[found[0].dtype]
        lists.assert_near(found, value, arithmetic=8, smallest=16 * working)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_values(variant, multi_tensor_adadelta, dtype):
    run(multi_tensor_adadelta, state(variant.device, dtype))
    if variant.simt:
        assert sum(n for name, n in variant.kernels.items() if "adadelta" in name) == 1


def test_large_tensors(variant):
    run(dispatcher, state(variant.device, F32, lists.SHAPES))


@pytest.mark.parametrize(
    "options", [dict(weight_decay=0.0), dict(eps=0.5), dict(rho=0.5), dict(lr=0.0)], ids=str
)
def test_options(variant, options):
    run(dispatcher, state(variant.device), **options)


def test_misaligned_views(variant, multi_tensor_adadelta):
    for k in range(4):
        tensors = state(variant.device)
        tensors[k] = lists.misaligned(tensors[k])
        run(multi_tensor_adadelta, tensors)


def test_scalars_on_the_device(variant, multi_tensor_adadelta):
    options = dict(lr_tensor=scalar(0.25, variant.device), inv_scale=scalar(0.125, variant.device))
    run(multi_tensor_adadelta, state(variant.device), 0.125, wanted=dict(lr=0.25), lr=99.0, **options)


@pytest.mark.parametrize("what", ["found_inf", "noop_flag"])
def test_a_flagged_step_changes_nothing(variant, multi_tensor_adadelta, what):
    raised = scalar(1.0, variant.device) if what == "found_inf" else flag(variant.device, 1)
    down = scalar(0.0, variant.device) if what == "found_inf" else flag(variant.device)
    tensors = state(variant.device)
    before = [lists.clones(column) for column in tensors]
    multi_tensor_adadelta(tensors, **(SCALARS | {what: raised}))
    for column, old in zip(tensors, before, strict=True):
        lists.assert_same_bits(column, old)
    run(multi_tensor_adadelta, tensors, **{what: down})


def test_bad_input_raises_before_anything_runs(variant, multi_tensor_adadelta):
    if not bindings.load().native:
        pytest.skip(f"the reference alone does not check its input: {bindings.load().reason}")
    tensors = state(variant.device)
    before = [lists.clones(column) for column in tensors]
    cases = [
        (TypeError, "no variant takes", [[t.double() for t in tensors[0]], *tensors[1:]], {}),
        (ValueError, "acc_deltas holds 1", [*tensors[:3], tensors[3][:1]], {}),
        (TypeError, "lr_tensor must be a Float", tensors, {"lr_tensor": scalar(1.0, variant.device, F64)}),
    ]
    for error, words, columns, changes in cases:
        with pytest.raises(error, match=words):
            multi_tensor_adadelta(columns, **(SCALARS | changes))
    for column, old in zip(tensors, before, strict=True):
        lists.assert_same_bits(column, old)


def test_opcheck():
    bindings.load()
    tensors = state("cpu", F32, ((3,), (2, 5)))
    options = SCALARS | dict(noop_flag=flag("cpu"))
    torch.library.opcheck(torch.ops.apex.multi_tensor_adadelta.default, tuple(tensors), options)
