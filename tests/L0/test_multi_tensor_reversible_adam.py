"""multi_tensor_reversible_adam against float64: steps, what is left out of them, and what undoing gives back.

Tolerance: one rounding to each output's dtype, some of the arithmetic's, and a little of the terms' size (they are
near 1), because sums may cancel.
"""

from __future__ import annotations

import lists
import pytest
import torch
from lists import BF16, F16, F32, F64, flag

from apex._loader import bindings

SCALARS = dict(step_size=0.25, beta1=0.875, beta2=0.75, eps=0.125, weight_decay=0.5, scale=4.0)
TYPES = [(F32, F32), (F16, F32), (BF16, F32), (F64, F64)]  # gradients, all else

dispatcher, multi_tensor_reversible_adam = lists.entrances("multi_tensor_reversible_adam")


def state(device, gradient=F32, own=F32, shapes=lists.FEW, copy=None):
    """[gradients, parameters, exp_avgs, exp_avg_sqs, copies] in the middle of a run."""
    g, p, m, v = (lists.random(own, device, shapes, seed=k) for k in range(4))
    g = [(8 * x).to(gradient) for x in g]
    copies = [] if copy is None else lists.empties(p, copy)
    return [g, p, m, [x.square() for x in v], copies]


def divisor(v, s):
    return (v + s["eps"]).sqrt() if s.get("eps_inside_sqrt") else v.sqrt() + s["eps"]


def expected(tensors, **changes):
    """([parameters], [exp_avgs], [exp_avg_sqs]) in float64."""
    s = SCALARS | changes
    results = []
    for g, p, m, v in zip(*map(lists.exact, tensors[:4]), strict=True):
        g = g / s["scale"]
        keep = ~torch.isfinite(g) if s.get("skip_non_finite") else torch.zeros_like(g, dtype=torch.bool)
        m2 = s["beta1"] * m + (1 - s["beta1"]) * g
        v2 = s["beta2"] * v + (1 - s["beta2"]) * g * g
        p2 = p - s["step_size"] * (m2 / divisor(v2, s) + s["weight_decay"] * p)
        results.append([torch.where(keep, *pair) for pair in ((p, p2), (m, m2), (v, v2))])
    return [list(column) for column in zip(*results, strict=True)]


def run(op, tensors, **options):
    values, gradients = expected(tensors, **options), lists.clones(tensors[0])
    op(tensors, **(SCALARS | options))
    lists.assert_same_bits(tensors[0], gradients)
    for found, value in zip(tensors[1:4], values, strict=True):
        lists.assert_near(found, value, arithmetic=8, smallest=16 * lists.ROUNDING[found[0].dtype])
    for copy, p in zip(tensors[4], tensors[1], strict=bool(tensors[4])):
        lists.assert_same_bits([copy], [p.to(copy.dtype)])


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_values(variant, multi_tensor_reversible_adam, types, inside):
    run(multi_tensor_reversible_adam, state(variant.device, *types), eps_inside_sqrt=inside)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_copies_are_the_rounded_parameters(variant, multi_tensor_reversible_adam, dtype):
    run(multi_tensor_reversible_adam, state(variant.device, dtype, copy=dtype))


def test_large_tensors(variant):
    run(dispatcher, state(variant.device, shapes=lists.SHAPES))


def test_misaligned_views(variant, multi_tensor_reversible_adam):
    for k in range(4):
        tensors = state(variant.device)
        tensors[k] = lists.misaligned(tensors[k])
        run(multi_tensor_reversible_adam, tensors)


def spoil(tensors, dtype):
    """Gradients that are inf and nan here and there."""
    for grad in tensors[0][2:]:
        grad.view(-1)[1] = float("inf")
        grad.view(-1)[-1] = float("nan")
    assert tensors[0][0].dtype == dtype


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_what_is_not_finite_stays_and_raises_the_flag(variant, multi_tensor_reversible_adam, dtype):
    raised = flag(variant.device)
    tensors = state(variant.device, dtype, copy=dtype)
    run(multi_tensor_reversible_adam, tensors, skip_non_finite=True, overflow_flag=raised)
    assert not raised.item()
    tensors = state(variant.device, dtype, copy=dtype)
    spoil(tensors, dtype)
    run(multi_tensor_reversible_adam, tensors, skip_non_finite=True, overflow_flag=raised)
    assert raised.item() == 1
    assert all(torch.isfinite(t).all() for t in tensors[1])


def test_without_skipping_nan_spreads(variant):
    tensors = state(variant.device)
    spoil(tensors, F32)
    run(dispatcher, tensors)
    assert torch.isnan(tensors[1][-1].view(-1)[-1])


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_undo_gives_back_what_was_there(variant, multi_tensor_reversible_adam, types, inside):
    tensors = state(variant.device, *types)
    spoil(tensors, types[0])
    before = [lists.clones(column) for column in tensors]
    options = SCALARS | dict(eps_inside_sqrt=inside)
    multi_tensor_reversible_adam(tensors, **options, skip_non_finite=True)
    stepped = [lists.clones(column) for column in tensors]
    assert not torch.equal(stepped[1][-1], before[1][-1])
    multi_tensor_reversible_adam(tensors, **options, undo=True, overflow_flag=flag(variant.device, 0))
    for column, old in zip(tensors, stepped, strict=True):
        lists.assert_same_bits(column, old)
    multi_tensor_reversible_adam(tensors, **options, undo=True, overflow_flag=flag(variant.device, 1))
    for column, old in zip(tensors[1:4], before[1:4], strict=True):
        rounding = lists.ROUNDING[types[1]]
        lists.assert_near(column, lists.exact(old), arithmetic=64, smallest=256 * rounding)
    assert all((t >= 0).all() for t in tensors[3])


def test_undoing_the_first_step_leaves_no_negative_square(variant):
    tensors = state(variant.device)
    for column in tensors[2:4]:
        for t in column:
            t.zero_()
    dispatcher(tensors, **SCALARS)
    dispatcher(tensors, **SCALARS, undo=True)
    assert all((t >= 0).all() for t in tensors[3])
    for column in tensors[2:4]:
        lists.assert_near(column, [torch.zeros_like(x) for x in lists.exact(column)], smallest=1e-5)


def test_bad_input_raises_before_anything_runs(variant, multi_tensor_reversible_adam):
    if not bindings.load().native:
        pytest.skip(f"the reference alone does not check its input: {bindings.load().reason}")
    tensors = state(variant.device)
    before = [lists.clones(column) for column in tensors]
    cases = [
        (TypeError, "no variant takes", [[t.double() for t in tensors[0]], *tensors[1:]], {}),
        (ValueError, "exp_avgs holds 1", [*tensors[:2], tensors[2][:1], *tensors[3:]], {}),
        (ValueError, "which is 0", tensors, dict(scale=0.0)),
        (ValueError, "betas must lie", tensors, dict(beta1=1.0)),
        (ValueError, "nothing is left", tensors, dict(beta2=0.0, undo=True)),
        (ValueError, "nothing is left", tensors, dict(weight_decay=4.0, undo=True)),
        (
            TypeError,
            "overflow_flag must be",
            tensors,
            dict(overflow_flag=torch.zeros(1, dtype=F32, device="cpu")),
        ),
    ]
    for error, words, columns, changes in cases:
        if "overflow_flag" in changes and variant.device != "cpu":
            continue
        with pytest.raises(error, match=words):
            multi_tensor_reversible_adam(columns, **(SCALARS | changes))
    for column, old in zip(tensors, before, strict=True):
        lists.assert_same_bits(column, old)


@pytest.mark.parametrize("options", [dict(skip_non_finite=True), dict(undo=True)], ids=str)
def test_opcheck(options):
    bindings.load()
    tensors = state("cpu", shapes=((3,), (2, 5)))
    options = SCALARS | options | dict(overflow_flag=flag("cpu"))
    torch.library.opcheck(torch.ops.apex.multi_tensor_reversible_adam.default, tuple(tensors), options)
