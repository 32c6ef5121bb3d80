"""index_mul_2d and its gradients against float64, on everything that can serve them, and as users call them."""

from __future__ import annotations

import lists
import pytest
import torch
from lists import BF16, F16, F32, F64

from apex._legacy import fused_index_mul_2d
from apex.contrib.index_mul_2d import index_mul_2d
from apex.contrib.index_mul_2d.index_mul_2d import IndexMul2d_, IndexMul2dBackward_, index_mul_2d_backward
from tests.L0.signatures import signature

DTYPES = [F32, F16, BF16, F64]
# (entries, rows, features): nothing; one; odd; vectors; wider than a tile; many rows of few entries.
CASES = [(3, 0, 4), (3, 5, 0), (1, 1, 1), (9, 40, 7), (50, 33, 64), (4, 11, 304), (2, 700, 16)]


def make(case, dtype, device, seed=1):
    """(in1, in2, index), the first two requiring gradients; the second entry is picked by none"""
    entries, rows, features = case
    in1, in2 = lists.random(dtype, device, ((entries, features), (rows, features)), seed=seed)
    index = torch.randint(
        0, entries, (rows,), generator=torch.Generator().manual_seed(seed), dtype=torch.int64, device="cpu"
    )
    if entries > 1:
        index[index == 1] = 0
    return in1.requires_grad_(), in2.requires_grad_(), index.to(device)


def check(in1, in2, index):
    """Product and gradients against float64; returns them."""
    out = index_mul_2d(in1, in2, index)
    assert out.dtype == in1.dtype and out.shape == in2.shape and out.is_contiguous()
    g = lists.random(out.dtype, out.device, (tuple(out.shape),), seed=5)[0]
    found = torch.autograd.grad(out, (in1, in2), g)
    a, b, wide = (t.detach().cpu().double() for t in (in1, in2, g))
    rows = index.cpu().long()
    lists.assert_near([out.detach(), found[1]], [a[rows] * b, wide * a[rows]])
    sums, sizes = (torch.zeros_like(a).index_add_(0, rows, t) for t in (wide * b, (wide * b).abs()))
    own, work = lists.ROUNDING[out.dtype], lists.ROUNDING[lists.math_dtype(out.dtype)]
    error = (found[0].cpu().double() - sums).abs()
    assert (error <= 1.01 * own * sums.abs() + 64 * work * sizes + lists.SMALLEST[out.dtype]).all()
    return out.detach(), *found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(variant, dtype):
    for case in CASES:
        in1, in2, index = make(case, dtype, variant.device)
        found = check(in1, in2, index)
        lists.assert_same_bits(found, check(in1, in2, index.int()))
        if case[0] > 1 and case[2]:
            assert found[1][1].eq(0).all()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_layouts(variant, dtype):
    """Transposed, strided and misaligned tensors, and an expanded gradient."""
    in1, in2, index = make((9, 40, 16), dtype, variant.device)
    transposed = [lists.random(dtype, variant.device, ((16, n),))[0].t().requires_grad_() for n in (9, 40)]
    check(*transposed, index)
    check(in1[:, ::2], in2[:, 1::2], index)
    check(*(t.requires_grad_() for t in lists.misaligned([in1.detach(), in2.detach()])), index)
    check(in1, in2, index.repeat_interleave(2)[::2])
    of_sum = torch.autograd.grad(index_mul_2d(in1, in2, index).sum(), (in1, in2))
    out = index_mul_2d(in1, in2, index)
    lists.assert_same_bits(of_sum, torch.autograd.grad(out, (in1, in2), torch.ones_like(out)))


def test_only_what_is_wanted(variant):
    in1, in2, index = make((9, 40, 16), F32, variant.device)
    both = torch.autograd.grad(index_mul_2d(in1, in2, index).sum(), (in1, in2))
    (first,) = torch.autograd.grad(index_mul_2d(in1, in2.detach(), index).sum(), in1)
    (second,) = torch.autograd.grad(index_mul_2d(in1.detach(), in2, index).sum(), in2)
    lists.assert_same_bits((first, second), both)


def test_double_backward(variant):
    """To any order: the gradients of the gradients are made of the same two ops."""
    in1, in2, index = make((4, 6, 5), F64, variant.device)
    assert torch.autograd.gradcheck(index_mul_2d, (in1, in2, index))
    assert torch.autograd.gradgradcheck(index_mul_2d, (in1, in2, index))
    inputs = in1, in2, (in2 * 2).detach().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda a, b, g: index_mul_2d_backward(a, b, index, g), inputs)


def test_indices_outside(variant):
    for wrong in (9, -1, 2**40, -(2**40)):
        in1, in2, index = make((9, 40, 16), F32, variant.device)
        index[3] = wrong
        if variant.device.type == "cpu":
            with pytest.raises(IndexError, match=rf"idx1\[3\] is {wrong}, outside \[0, 9\)"):
                index_mul_2d(in1, in2, index)
        else:
            out = index_mul_2d(in1, in2, index)
            first, second = torch.autograd.grad(out.nansum(), (in1, in2))
            assert out[3].isnan().all() and out.isnan().sum() == 16
            assert first.isfinite().all() and second.isnan().any(1).sum() == 1


@pytest.mark.parametrize(
    "change, error",
    [
        (lambda a, b, i: (a.int(), b.int(), i), TypeError),
        (lambda a, b, i: (a, b.half(), i), TypeError),
        (lambda a, b, i: (a, b, i.float()), TypeError),
        (lambda a, b, i: (a[0], b, i), ValueError),
        (lambda a, b, i: (a, b[:, :3], i), ValueError),
        (lambda a, b, i: (a, b, i[:3]), ValueError),
        (lambda a, b, i: (a, b, i[:, None]), ValueError),
    ],
)
def test_bad_arguments(variant, change, error):
    in1, in2, index = make((9, 40, 16), F32, variant.device)
    with pytest.raises(error, match="index_mul_2d"):
        index_mul_2d(*change(in1.detach(), in2.detach(), index))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_index_mul_2d(variant, dtype):
    """The legacy module's functions, which write to what they are given."""
    m = fused_index_mul_2d
    forward, backward, second = (
        (m.half_forward, m.half_backward, m.half_backward_backward)
        if dtype == F16
        else (m.float_forward, m.float_backward, m.float_backward_backward)
    )
    in1, in2, index = make((9, 40, 16), dtype, variant.device)
    g, gg1, gg2 = lists.random(dtype, variant.device, ((40, 16), (9, 16), (40, 16)), seed=8)
    g.requires_grad_()
    out, of_in1, of_in2 = torch.empty_like(in2), torch.zeros_like(in1), torch.empty_like(in2)
    forward(out, in1, in2, index)
    backward(of_in1, of_in2, g, in1, in2, index)
    expected = index_mul_2d(in1, in2, index)
    wanted = torch.autograd.grad(expected, (in1, in2), g, create_graph=True)
    lists.assert_same_bits((out, of_in1, of_in2), (expected, *wanted))
    made = torch.empty_like(g), torch.zeros_like(in1), torch.empty_like(in2)
    second(*made, g, gg1, gg2, in1, in2, index)
    lists.assert_same_bits(made, torch.autograd.grad(wanted, (g, in1, in2), (gg1, gg2)))


def test_public_names():
    assert signature(IndexMul2d_.forward) == "(ctx, in1, in2, idx1)"
    assert signature(IndexMul2dBackward_.forward) == "(ctx, in1, in2, idx1, grad_out)"


def test_around_the_op():
    """opcheck, one compiled graph for every number of rows, torch.func, and forward mode refused."""
    from torch._dynamo.testing import CompileCounterWithBackend

    in1, in2, index = make((9, 40, 16), F32, "cpu")
    torch.library.opcheck(torch.ops.apex.index_mul_2d_forward.default, (in1, in2, index))
    arguments = (in2.detach(), in1.detach(), in2.detach(), index, True, False)
    torch.library.opcheck(torch.ops.apex.index_mul_2d_backward.default, arguments)
    counter = CompileCounterWithBackend("aot_eager")

    def function(a, b, i):
        return index_mul_2d(a * 2, b, i)

    compiled, counts = torch.compile(function, fullgraph=True, dynamic=True, backend=counter), []
    for rows in (40, 3, 11):
        inputs = make((9, rows, 16), F32, "cpu")
        ours, eager = (torch.autograd.grad(f(*inputs).sum(), inputs[:2]) for f in (compiled, function))
        torch.testing.assert_close(ours, eager)
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1
    found = torch.func.grad(lambda a: index_mul_2d(a, in2, index).square().sum())(in1.detach())
    torch.testing.assert_close(
        found, torch.autograd.grad(index_mul_2d(in1, in2, index).square().sum(), in1)[0]
    )
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda a: index_mul_2d(a, in2, index), (in1.detach(),), (in1.detach(),))
