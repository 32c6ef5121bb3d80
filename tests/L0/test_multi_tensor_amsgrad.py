"""multi_tensor_amsgrad against float64, by every entrance and on everything that can serve it.

Tolerance: one rounding to each output's dtype, some of the arithmetic's, and a little of the terms' size (they are
near 1), because sums may cancel.
"""

from __future__ import annotations

import lists
import pytest
import torch
from lists import F32, F64, flag, scalar

from apex._loader import bindings

L2, DECOUPLED = 0, 1
SCALARS = dict(
    lr=0.1, beta1=0.9, beta2=0.99, eps=1e-2, step=3, decay_mode=L2, bias_correction=True, weight_decay=0.3
)


dispatcher, multi_tensor_amsgrad = lists.entrances("multi_tensor_amsgrad")


def state(device, dtype=F32, shapes=lists.FEW):
    """[gradients, parameters, exp_avgs, exp_avg_sqs, largest of these] in the middle of a run."""
    tensors = [lists.random(dtype, device, shapes, seed=k) for k in range(5)]
    return [*tensors[:3], *([x.square() for x in column] for column in tensors[3:])]


def expected(tensors, factor=1.0, **changes):
    s = SCALARS | changes
    correct = [1 - s[beta] ** s["step"] if s["bias_correction"] else 1.0 for beta in ("beta1", "beta2")]
    results = []
    for g, p, m, v, most in zip(*map(lists.exact, tensors), strict=True):
        g = g * factor + (s["weight_decay"] * p if s["decay_mode"] == L2 else 0)
        m = s["beta1"] * m + (1 - s["beta1"]) * g
        v = s["beta2"] * v + (1 - s["beta2"]) * g * g
        most = torch.maximum(most, v)
        kept = p * (1 - s["lr"] * s["weight_decay"]) if s["decay_mode"] == DECOUPLED else p
        update = m / correct[0] / ((most / correct[1]).sqrt() + s["eps"])
        results.append((kept - s["lr"] * update, m, v, most))
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


@pytest.mark.parametrize("decay_mode", [L2, DECOUPLED], ids=["l2", "decoupled"])
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_values(variant, multi_tensor_amsgrad, dtype, decay_mode):
    run(multi_tensor_amsgrad, state(variant.device, dtype), decay_mode=decay_mode)
    if variant.simt:
        assert sum(n for name, n in variant.kernels.items() if "amsgrad" in name) == 1


def test_large_tensors(variant):
    run(dispatcher, state(variant.device, F32, lists.SHAPES))


@pytest.mark.parametrize(
    "options", [dict(weight_decay=0.0), dict(eps=0.5), dict(step=1), dict(bias_correction=False)], ids=str
)
def test_options(variant, options):
    run(dispatcher, state(variant.device), **options)


def test_misaligned_views(variant, multi_tensor_amsgrad):
    for k in range(5):
        tensors = state(variant.device)
        tensors[k] = lists.misaligned(tensors[k])
        run(multi_tensor_amsgrad, tensors)


def test_scalars_on_the_device(variant, multi_tensor_amsgrad):
    steps = scalar(3, variant.device, torch.int32)
    options = dict(
        lr_tensor=scalar(0.25, variant.device), inv_scale=scalar(0.125, variant.device), step_tensor=steps
    )
    run(
        multi_tensor_amsgrad,
        state(variant.device),
        0.125,
        wanted=dict(lr=0.25, step=3),
        lr=99.0,
        step=0,
        **options,
    )
    options["advance_step"] = True
    run(
        multi_tensor_amsgrad,
        state(variant.device),
        0.125,
        wanted=dict(lr=0.25, step=4),
        lr=99.0,
        step=0,
        **options,
    )
    assert steps.item() == 4


def test_a_nan_stays(variant):
    for k in (3, 4):
        tensors = state(variant.device, F32, ((7,),))
        tensors[k][0][2] = float("nan")
        dispatcher(tensors, **SCALARS)
        assert tensors[4][0].isnan().tolist() == [i == 2 for i in range(7)]


@pytest.mark.parametrize("what", ["found_inf", "noop_flag"])
def test_a_flagged_step_changes_nothing(variant, multi_tensor_amsgrad, what):
    raised = scalar(1.0, variant.device) if what == "found_inf" else flag(variant.device, 1)
    down = scalar(0.0, variant.device) if what == "found_inf" else flag(variant.device)
    tensors = state(variant.device)
    before = [lists.clones(column) for column in tensors]
    multi_tensor_amsgrad(tensors, **(SCALARS | {what: raised}))
    for column, old in zip(tensors, before, strict=True):
        lists.assert_same_bits(column, old)
    run(multi_tensor_amsgrad, tensors, **{what: down})


def test_bad_input_raises_before_anything_runs(variant, multi_tensor_amsgrad):
    if not bindings.load().native:
        pytest.skip(f"the reference alone does not check its input: {bindings.load().reason}")
    tensors = state(variant.device)
    before = [lists.clones(column) for column in tensors]
    cases = [
        (TypeError, "no variant takes", [[t.double() for t in tensors[0]], *tensors[1:]], {}),
        (ValueError, "max_exp_avg_sqs holds 1", [*tensors[:4], tensors[4][:1]], {}),
        (ValueError, "multi_tensor_amsgrad: decay_mode is 0", tensors, {"decay_mode": 2}),
        (ValueError, "multi_tensor_amsgrad: betas must lie", tensors, {"beta1": 1.0}),
        (ValueError, "multi_tensor_amsgrad: step counts from 1", tensors, {"step": 0}),
        (TypeError, "lr_tensor must be a Float", tensors, {"lr_tensor": scalar(1.0, variant.device, F64)}),
    ]
    for error, words, columns, changes in cases:
        with pytest.raises(error, match=words):
            multi_tensor_amsgrad(columns, **(SCALARS | changes))
    for column, old in zip(tensors, before, strict=True):
        lists.assert_same_bits(column, old)


def test_opcheck():
    bindings.load()
    tensors = state("cpu", F32, ((3,), (2, 5)))
    options = SCALARS | dict(noop_flag=flag("cpu"))
    torch.library.opcheck(torch.ops.apex.multi_tensor_amsgrad.default, tuple(tensors), options)
