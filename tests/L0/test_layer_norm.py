"""The ops of both norms against float64, on everything that can serve them."""

from __future__ import annotations

import ctypes

import lists
import norms
import pytest
import torch
from lists import BF16, F16, F32, F64
from norms import FEW, NORMS, SHAPES

from apex._loader import bindings, library

bindings.load()
pytestmark = pytest.mark.parametrize("norm", NORMS, ids=lambda n: n.name)


@pytest.mark.parametrize("memory_efficient", [False, True], ids=["input", "output"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=str)
def test_values(variant, norm, dtype, memory_efficient):
    """Reports: zero-size batches give exact zeros as weight gradients; hidden sizes that no vector fits."""
    for shape in SHAPES:
        if variant.simt and dtype == F64 and shape[-1] > 4096:
            continue
        hidden = shape[-1:]
        weights = norm.make(hidden, dtype, variant.device)
        x = norms.random(shape, dtype, variant.device)
        _, found = norms.check(norm, x, hidden, weights, memory_efficient)
        if not x.numel():
            assert all(g.eq(0).all() for g in found[1:])
    if variant.simt:
        assert variant.kernels.total() > 0


@pytest.mark.parametrize(
    "source, target, weight", [(F32, BF16, F32), (F16, F32, F32), (BF16, F32, F16)], ids=str
)
@pytest.mark.parametrize("memory_efficient", [False, True], ids=["input", "output"])
def test_mixed_dtypes(variant, norm, source, target, weight, memory_efficient):
    for shape in FEW:
        weights = norm.make(shape[-1:], weight, variant.device)
        x = norms.random(shape, source, variant.device)
        norms.check(norm, x, shape[-1:], weights, memory_efficient, target)


def test_layouts(variant, norm):
    """Several normalised dimensions; no weights; transposed inputs and gradients; views between two vectors."""
    device = variant.device
    weights = norm.make((3, 24), F32, device)
    x = norms.random((5, 3, 24), F32, device)
    norms.check(norm, x, (3, 24), weights)
    norms.check(norm, x[0], (3, 24), weights)  # no dimension but the normalised ones: one row
    norms.check(norm, x, (24,), ())
    norms.check(norm, norms.random((24, 5), BF16, device).t(), (24,), norm.make((24,), BF16, device))
    norms.check(norm, x[::2, :, ::2], (12,), norm.make((12,), F32, device))
    for dtype in (F32, F16):
        misaligned = lists.misaligned([norms.random((3, 64), dtype, device)])[0]
        norms.check(norm, misaligned, (64,), norm.make((64,), dtype, device))
    x = x.requires_grad_()
    y = norm.forward(x, (24,), ())
    torch.testing.assert_close(
        torch.autograd.grad(
            y, x, torch.ones(5, 3, 1, device=device, dtype=F32).expand(5, 3, 24), retain_graph=True
        )[0],
        torch.autograd.grad(y, x, torch.ones(5, 3, 24, device=device, dtype=F32))[0],
    )


@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
def test_residual(variant, norm, dtype):
    """The sum is what torch adds, and both outputs' gradients reach both inputs."""
    for shape in FEW:
        hidden, device = shape[-1:], variant.device
        weights = norm.make(hidden, dtype, device)
        x, r = (norms.random(shape, dtype, device, seed=s).requires_grad_() for s in (1, 2))
        y, total = norm.add_forward(x, r, hidden, weights)
        assert torch.equal(total, x + r)
        g, gs = (norms.random(shape, dtype, device, seed=s) for s in (3, 4))
        found = torch.autograd.grad((y, total), (x, r, *weights), (g, gs))
        wide = [norms.leaf(t) for t in (total, *weights)]
        expected = norm.exact(wide[0], hidden, wide[1:])
        wanted = torch.autograd.grad((expected, wide[0] * 1.0), wide, (g.cpu().double(), gs.cpu().double()))
        norms.near(y, expected)
        for tensor, value in zip(found, (wanted[0], *wanted), strict=True):
            norms.near(tensor, value, dtype)
        only_sum = torch.autograd.grad(norm.add_forward(x, r, hidden, weights)[1], (x, r), gs)
        assert torch.equal(only_sum[0], gs) and torch.equal(only_sum[1], gs)


def test_many_rows(variant, norm):
    """Report: rows at and past 65536 gave garbage. And the same input gives the same bits again."""
    if variant.simt:
        pytest.skip("minutes on the executor; tests/simt launches many rows on few blocks")
    for rows in (65535, 65536):
        weights = norm.make((32,), F32, variant.device)
        x = norms.random((rows, 32), F32, variant.device)
        first = norms.check(norm, x, (32,), weights)
        again = norms.check(norm, x, (32,), weights)
        lists.assert_same_bits([first[0], *first[1]], [again[0], *again[1]])


@pytest.mark.gpu
def test_more_rows_than_a_grid(variant, norm):
    """Report: no step at any number of rows. Float32, with and without weights; sixty million elements."""
    x = norms.random((2**20 + 1, 64), F32, variant.device)
    norms.check(norm, x, (64,), norm.make((64,), F32, variant.device))
    norms.check(norm, x, (64,), ())


@pytest.mark.gpu  # its shared memory; tests/simt runs these kernels
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("hidden", [2048, 4096, 8192, 12288])
def test_lengths_that_kernels_know(variant, norm, hidden, dtype):
    """Enough rows for every team of threads, and one more for some; weights of another dtype; the same bits again."""
    x = norms.random((2405, hidden), dtype, variant.device)
    for weight in (dtype, F32):
        weights = norm.make((hidden,), weight, variant.device)
        first, again = (norms.check(norm, x, (hidden,), weights) for _ in range(2))
        lists.assert_same_bits([first[0], *first[1]], [again[0], *again[1]])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_weight_gradients_over_all_rows(variant, norm, dtype):
    """Report: where the wave size was assumed, weight gradients were off by half."""
    shape = (64, 768) if variant.simt else (512, 768)
    norms.check(
        norm, norms.random(shape, dtype, variant.device), (768,), norm.make((768,), dtype, variant.device)
    )


def test_layouts_that_benchmarks_ask_for(variant, norm):
    """Every kernel gives the same to rounding, however a row is shared; one that does not fit is not taken."""
    if not variant.simt:
        pytest.skip("counts kernels, which the executor does")
    function = library.load().c.apex_set_norm_layout
    function.argtypes, function.restype = [ctypes.c_int32, ctypes.c_void_p], None
    weights = norm.make((264,), BF16, variant.device)
    x = norms.random((5, 264), BF16, variant.device)
    try:
        for vectors, teams, taken in ((2, 1, "bf16x2"), (4, 2, "bf16x4"), (3, 2, "bf16x3"), (7, 0, "long8")):
            layout = (ctypes.c_int32 * 5)(vectors, teams, 64 if teams == 1 else 0, 1, 2)
            for backward in (0, 1):
                function(backward, ctypes.byref(layout))
            variant.kernels.clear()
            norms.check(norm, x, (264,), weights)
            names = set(variant.kernels)
            assert {f"{norm.name}_forward_{taken}", f"{norm.name}_backward_{taken}"} <= names
    finally:
        for backward in (0, 1):
            function(backward, None)


def test_same_bits(variant, norm):
    weights = norm.make((136,), BF16, variant.device)
    x = norms.random((37, 136), BF16, variant.device)
    first, again = (norms.check(norm, x, (136,), weights) for _ in range(2))
    lists.assert_same_bits([first[0], *first[1]], [again[0], *again[1]])


def test_frozen_parts(variant, norm):
    """Gradients that nobody wants are not made, and those that are wanted stay the same."""
    device = variant.device
    weights = norm.make((64,), F32, device)
    x = norms.random((6, 64), F32, device).requires_grad_()
    y = norm.forward(x, (64,), weights)
    everything = torch.autograd.grad(y, [x, *weights], torch.ones_like(y))
    frozen = [w.detach() for w in weights]
    y = norm.forward(x, (64,), frozen)
    assert torch.equal(torch.autograd.grad(y, x, torch.ones_like(y))[0], everything[0])
    y = norm.forward(x.detach(), (64,), weights)
    found = torch.autograd.grad(y, weights, torch.ones_like(y))
    lists.assert_same_bits(found, everything[1:])


def test_extreme_values(variant, norm):
    """Large offsets keep their digits (the variance is centred); inf and nan stay in their row."""
    device = variant.device
    x = norms.random((4, 1000), F32, device) + (1e4 if norm.centered else 0)
    y = norm.forward(x, (1000,), ())
    norms.near(y * 1e-4, norm.exact(x.double().cpu(), (1000,), ()) * 1e-4, loose=2)
    x[1, 3], x[2, 5] = float("inf"), float("nan")
    y = norm.forward(x, (1000,), ())
    assert y[1].isnan().any() and y[2].isnan().all() and y[[0, 3]].isfinite().all()
    zeros = norm.forward(torch.zeros(2, 64, device=device, dtype=F32), (64,), ())
    assert zeros.eq(0).all()


def test_rows_that_hardly_vary(variant, norm):
    """Rows of one value, however large it is; and a mean that rounds does not widen the deviation."""
    far = norm.centered and variant.wanted == "cpu"  # sums of others overflow, and theirs round
    for dtype in (F32, BF16):
        for hidden in (1, 15, 16, 17, 33, 100, 3000):
            x = torch.full((3, hidden), 1e38 if far else 3e3, dtype=dtype, device=variant.device)
            y = norm.forward(x, (hidden,), ())
            most = 2 * lists.ROUNDING[dtype] if not norm.centered else 0 if far else 1e-2
            assert y.sub(0 if norm.centered else 1).abs().max() <= most
    x = torch.tensor([[1.0, 4.0], [2.0, 5.0]], dtype=F32, device=variant.device) / 16 + (1e6 if far else 0)
    expected = norm.exact(x.double().cpu(), (2,), ())
    torch.testing.assert_close(norm.forward(x, (2,), ()).double().cpu(), expected, rtol=1e-5, atol=0)
