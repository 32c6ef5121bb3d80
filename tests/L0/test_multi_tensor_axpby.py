"""multi_tensor_axpby against float64, by every entrance and on everything that can serve it.

Tolerance: one rounding to the output's dtype, and three of the arithmetic's (the scalars, the products, the
sum) relative to the larger term: terms of opposite signs may cancel.
"""

from __future__ import annotations

import itertools

import lists
import pytest
import torch
from lists import BF16, F16, F32, F64, flag

from apex._loader import bindings

TYPES = [*itertools.product((F32, F16, BF16), repeat=3), (F64, F64, F64)]
A, B = 0.37, -1.9
BOTH, X, Y = -1, 0, 1


def dispatcher(x, y, outputs, noop_flag, a, b, arg_to_check=BOTH):
    torch.ops.apex.multi_tensor_axpby(x, y, outputs, noop_flag, a, b, arg_to_check)


def direct(x, y, outputs, noop_flag, a, b, arg_to_check=BOTH):
    module = bindings.load().module
    if module is None:
        pytest.skip(f"no bindings: {bindings.load().reason}")
    module.multi_tensor_axpby([x, y, outputs], noop_flag, a, b, arg_to_check)


@pytest.fixture(params=[dispatcher, direct], ids=lambda f: f.__name__)
def axpby(request):
    bindings.load()
    return request.param


def launches(variant):
    return sum(n for name, n in variant.kernels.items() if "axpby" in name)


def check(op, x, y, outputs, expected=None):
    expected = expected or [A * p + B * q for p, q in zip(lists.exact(x), lists.exact(y), strict=True)]
    terms = [abs(A * p) + abs(B * q) for p, q in zip(lists.exact(x), lists.exact(y), strict=True)]
    dtypes = [(p.dtype, q.dtype) for p, q in zip(x, y, strict=True)]
    noop_flag = flag(outputs[0].device)
    op(x, y, outputs, noop_flag, A, B)
    assert noop_flag.item() == 0
    for found, value, term, pair in zip(outputs, expected, terms, dtypes, strict=True):
        math = lists.ROUNDING[lists.math_dtype(*pair, found.dtype)]
        largest = float(term.max()) if term.numel() else 0.0
        lists.assert_near([found], [value], dtypes=pair, smallest=3 * math * largest)


@pytest.mark.parametrize("x, y, output", TYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_values(variant, axpby, x, y, output):
    shapes = lists.SHAPES if x == y == output else lists.SHAPES[:6]
    left, right = lists.random(x, variant.device, shapes), lists.random(y, variant.device, shapes, seed=2)
    before = lists.clones(left + right)
    check(axpby, left, right, lists.empties(left, output))
    lists.assert_same_bits(left + right, before)
    if variant.simt:
        assert launches(variant) == 1


def test_misaligned_views(variant, axpby):
    """One list at a time, and all."""
    tensors = [
        lists.random(F16, variant.device),
        lists.random(F32, variant.device),
        lists.random(BF16, variant.device),
    ]
    for shifted in ((0,), (1,), (2,), (0, 1, 2)):
        check(
            axpby, *(lists.misaligned(t) if k in shifted else lists.clones(t) for k, t in enumerate(tensors))
        )


def test_memory_orders(variant, axpby):
    x = lists.channels_last(F32, variant.device)
    y = lists.channels_last(F16, variant.device)
    check(axpby, x, y, lists.empties(x, BF16))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("place", [X, Y])
def test_the_output_may_be_an_input(variant, axpby, dtype, place):
    """As public apex accumulates into stashed gradients."""
    inputs = [lists.random(dtype, variant.device), lists.random(dtype, variant.device, seed=2)]
    expected = [A * p + B * q for p, q in zip(*map(lists.exact, inputs), strict=True)]
    check(axpby, *inputs, inputs[place], expected)


def test_mixed_dtypes_in_one_call(variant, axpby):
    """One launch a combination of dtypes."""
    columns = [[], [], []]
    for types in TYPES:
        for k, dtype in enumerate(types):
            columns[k] += lists.random(dtype, variant.device, ((5,), (0,), (130,)), seed=k)
    check(axpby, *columns)
    if variant.simt:
        assert launches(variant) == len(TYPES)


@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=str)
@pytest.mark.parametrize("arg_to_check", [BOTH, X, Y])
@pytest.mark.parametrize("place", [X, Y])
def test_flags_what_is_asked_for(variant, axpby, dtype, place, arg_to_check):
    for bad in (float("inf"), float("nan")):
        inputs = [lists.random(dtype, variant.device, ((3,), (1031,)), seed=seed) for seed in (1, 2)]
        inputs[place][-1].view(-1)[-1] = bad
        outputs, noop_flag = lists.empties(inputs[0]), flag(variant.device)
        axpby(*inputs, outputs, noop_flag, A, B, arg_to_check)
        assert noop_flag.item() == (arg_to_check in (BOTH, place))
        assert not outputs[-1].view(-1)[-1].isfinite() and outputs[-1].view(-1)[:-1].isfinite().all()


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_result_that_overflows_is_not_flagged(variant, axpby, dtype, in_place):
    """As public apex: only the inputs are looked at, also where the output takes the place of one."""
    large = [torch.full((9,), 0.9 * torch.finfo(dtype).max, device=variant.device, dtype=dtype)]
    outputs, noop_flag = large if in_place else lists.empties(large), flag(variant.device)
    axpby(large, large, outputs, noop_flag, 1.0, 1.0)
    assert noop_flag.item() == 0 and outputs[0].isinf().all()


@pytest.mark.parametrize("dtype", [F32, F16, F64], ids=str)
def test_a_on_the_device(variant, dtype):
    """The inverse of a loss scale that the host has not read."""
    x, y = lists.random(dtype, variant.device), lists.random(dtype, variant.device, seed=2)
    expected, found = lists.empties(x), lists.empties(x)
    dispatcher(x, y, expected, None, 0.375, B)
    torch.ops.apex.multi_tensor_axpby(x, y, found, None, 9.0, B, BOTH, lists.scalar(0.375, variant.device))
    lists.assert_same_bits(found, expected)


@pytest.mark.parametrize("tensors", [[], [(0,)], [(0,), (3, 0)]], ids=str)
def test_nothing_to_do(variant, axpby, tensors):
    x = [torch.ones(shape, device=variant.device, dtype=F32) for shape in tensors]
    axpby(x, lists.clones(x), lists.empties(x), None, A, B)
    assert not launches(variant)


def test_bad_input_raises_before_anything_runs(variant, axpby):
    if not bindings.load().native:
        pytest.skip(f"the reference alone does not check its input: {bindings.load().reason}")
    one, two = ([torch.ones(3, device=variant.device, dtype=F32) for _ in range(n)] for n in (1, 2))
    output = [torch.full((3,), 7.0, device=variant.device, dtype=F32)]
    cases = [
        (ValueError, "arg_to_check", (one, one, output, None, A, B, 2)),
        (ValueError, "outputs holds 1 tensors but x holds 2", (two, two, output, None, A, B)),
        (TypeError, "no variant takes", (one, [one[0].double()], output, None, A, B)),
        (
            ValueError,
            r"x\[0\] has 4 elements",
            ([torch.ones(4, device=variant.device, dtype=F32)], one, output, None, A, B),
        ),
        (
            TypeError,
            "noop_flag must be a Int",
            (one, one, output, torch.zeros(1, dtype=F32, device="cpu"), A, B),
        ),
    ]
    for error, words, arguments in cases:
        with pytest.raises(error, match=words):
            axpby(*arguments)
    assert output[0].eq(7).all() and not launches(variant) and not variant.references


def test_opcheck():
    bindings.load()
    x, y = lists.random(F32, "cpu", ((3,), (2, 5))), lists.random(F16, "cpu", ((3,), (2, 5)), seed=2)
    for noop_flag in (None, flag("cpu")):
        arguments = (x, y, lists.empties(x, BF16), noop_flag, A, B, BOTH)
        torch.library.opcheck(torch.ops.apex.multi_tensor_axpby.default, arguments)
