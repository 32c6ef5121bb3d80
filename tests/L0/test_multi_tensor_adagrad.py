"""multi_tensor_adagrad against float64, by every entrance and on everything that can serve it.

Tolerance: one rounding to each output's dtype, four of the arithmetic's, and a little of the terms' size
(they are near 1), because sums may cancel.
"""

from __future__ import annotations

import lists
import pytest
import torch
from lists import BF16, F16, F32, F64, flag, scalar

from apex._loader import bindings

L2, DECOUPLED = 0, 1
# gradient, parameter, sum of squares
PAIRS = [(F32, F32), (F16, F32), (BF16, F32), (F16, F16), (F32, F16), (BF16, BF16), (F32, BF16), (F64, F64)]
DTYPES = [(*pair, F64 if pair[1] == F64 else F32) for pair in PAIRS] + [(F16,) * 3, (BF16,) * 3]
SCALARS = dict(lr=0.1, eps=1e-6, decay_mode=L2, weight_decay=0.3)


dispatcher, multi_tensor_adagrad = lists.entrances("multi_tensor_adagrad")


def state(device, dtypes=(F32, F32, F32), shapes=lists.FEW):
    """[gradients, parameters, sums] in the middle of a training run."""
    tensors = [lists.random(dtype, device, shapes, seed=k) for k, dtype in enumerate(dtypes)]
    return [*tensors[:2], [x.square() for x in tensors[2]]]


def expected(tensors, inv_scale=1.0, **changes):
    """[parameters, sums] after the paper's step, in float64."""
    s = SCALARS | changes
    parameters, sums = [], []
    for g, p, h in zip(*map(lists.exact, tensors), strict=True):
        g = g * inv_scale + (s["weight_decay"] * p if s["decay_mode"] == L2 else 0)
        sums.append(h + g * g)
        decay = s["weight_decay"] * p if s["decay_mode"] == DECOUPLED else 0
        parameters.append(p - s["lr"] * (g / (sums[-1].sqrt() + s["eps"]) + decay))
    return parameters, sums


def run(op, tensors, inv_scale=1.0, wanted=None, **options):
    """One step, compared. wanted: what the oracle is told beside the options."""
    values = expected(tensors, inv_scale, **(options | (wanted or {})))
    gradients = lists.clones(tensors[0])
    op(tensors, **(SCALARS | options))
    lists.assert_same_bits(tensors[0], gradients)
    for found, value in zip(tensors[1:], values, strict=True):
        working = lists.ROUNDING[F64 if found and found[0].dtype == F64 else F32]
        lists.assert_near(found, value, arithmetic=4, smallest=16 * working)


@pytest.mark.parametrize("decay_mode", [L2, DECOUPLED], ids=["l2", "decoupled"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda dtypes: "-".join(str(d)[6:] for d in dtypes))
def test_values(variant, multi_tensor_adagrad, dtypes, decay_mode):
    run(multi_tensor_adagrad, state(variant.device, dtypes), decay_mode=decay_mode)
    if variant.simt:
        assert sum(n for name, n in variant.kernels.items() if "adagrad" in name) == 1


def test_large_tensors(variant):
    run(dispatcher, state(variant.device, (BF16, F32, F32), lists.SHAPES))


@pytest.mark.parametrize("options", [dict(weight_decay=0.0), dict(eps=0.5), dict(lr=0.0)], ids=str)
def test_options(variant, options):
    run(dispatcher, state(variant.device), **options)


def test_misaligned_views(variant, multi_tensor_adagrad):
    for k in range(3):
        tensors = state(variant.device)
        tensors[k] = lists.misaligned(tensors[k])
        run(multi_tensor_adagrad, tensors)


def test_memory_orders(variant, multi_tensor_adagrad):
    """Gradients may have other strides than their parameters."""
    tensors = [lists.channels_last(F32, variant.device, seed=10 * k) for k in range(3)]
    tensors[2] = [x.square() for x in tensors[2]]
    run(multi_tensor_adagrad, tensors)
    run(multi_tensor_adagrad, [[g.contiguous() for g in tensors[0]], *tensors[1:]])


def test_mixed_dtypes_in_one_call(variant, multi_tensor_adagrad):
    columns = [[], [], []]
    for dtypes in DTYPES:
        for column, new in zip(columns, state(variant.device, dtypes, ((5,), (0,), (130,))), strict=True):
            column += new
    run(multi_tensor_adagrad, columns)
    if variant.simt:
        assert sum(n for name, n in variant.kernels.items() if "adagrad" in name) == len(DTYPES)


def test_scalars_on_the_device(variant, multi_tensor_adagrad):
    options = dict(lr_tensor=scalar(0.25, variant.device), inv_scale=scalar(0.125, variant.device))
    tensors = state(variant.device, (F16, F32, F32))
    parameters, _ = expected(tensors, 0.125, lr=0.25)
    multi_tensor_adagrad(tensors, **(SCALARS | options | dict(lr=99.0)))
    lists.assert_near(tensors[1], parameters, smallest=1e-6)


@pytest.mark.parametrize("what", ["found_inf", "noop_flag"])
def test_a_flagged_step_changes_nothing(variant, multi_tensor_adagrad, what):
    raised = scalar(1.0, variant.device) if what == "found_inf" else flag(variant.device, 1)
    down = scalar(0.0, variant.device) if what == "found_inf" else flag(variant.device)
    tensors = state(variant.device)
    before = [lists.clones(column) for column in tensors]
    multi_tensor_adagrad(tensors, **(SCALARS | {what: raised}))
    for column, old in zip(tensors, before, strict=True):
        lists.assert_same_bits(column, old)
    run(multi_tensor_adagrad, tensors, **{what: down})


def test_bad_input_raises_before_anything_runs(variant, multi_tensor_adagrad):
    if not bindings.load().native:
        pytest.skip(f"the reference alone does not check its input: {bindings.load().reason}")
    tensors = state(variant.device)
    before = [lists.clones(column) for column in tensors]
    cases = [
        (ValueError, "decay_mode is 0", tensors, {"decay_mode": 2}),
        (TypeError, "no variant takes", [[t.double() for t in tensors[0]], *tensors[1:]], {}),
        (ValueError, "sums holds 1", [*tensors[:2], tensors[2][:1]], {}),
        (TypeError, "lr_tensor must be a Float", tensors, {"lr_tensor": scalar(1.0, variant.device, F64)}),
    ]
    for error, words, columns, changes in cases:
        with pytest.raises(error, match=words):
            multi_tensor_adagrad(columns, **(SCALARS | changes))
    for column, old in zip(tensors, before, strict=True):
        lists.assert_same_bits(column, old)


def test_opcheck():
    bindings.load()
    tensors = state("cpu", (BF16, F32, F32), ((3,), (2, 5)))
    options = SCALARS | dict(noop_flag=flag("cpu"))
    torch.library.opcheck(torch.ops.apex.multi_tensor_adagrad.default, tuple(tensors), options)
