"""dense and dense_gelu_dense against float64: by torch's products everywhere, by the vendor's BLAS on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import lists
import pytest
import torch
import torch.nn.functional as F
from lists import BF16, F16, F32, F64
from torch.library import opcheck

from apex._loader import bindings

bindings.load()
op = torch.ops.apex
ACTIVATIONS = {
    "none": lambda x: x,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
}
# (shape of the input, outputs): a vector; odd; whole vectors; more dimensions; no rows; nothing in; nothing out.
SHAPES = [((5,), 3), ((7, 13), 5), ((64, 32), 48), ((2, 3, 16), 8), ((0, 8), 4), ((3, 0), 4), ((3, 8), 0)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make(shape, outputs, dtype, device, bias=True):
    """(input, weight, bias), requiring gradients, as large as those of a layer in use."""
    shapes = (shape, (outputs, shape[-1]), (outputs,))
    x, w, b = (
        lists.random(dtype, device, (s,), scale=scale, seed=i)[0].requires_grad_()
        for i, (s, scale) in enumerate(zip(shapes, (1.0, 0.3, 0.5), strict=True))
    )
    return x, w, b if bias else None


def check(found, wanted, dtype, depth):
    """No worse than two roundings to the dtype and the sum of `depth` products in float32."""
    unit, work = lists.ROUNDING[dtype], lists.ROUNDING[lists.math_dtype(dtype)]
    scale = max(1.0, wanted.abs().max().item()) if wanted.numel() else 1.0
    bound = (3 * unit + depth * work) * scale
    torch.testing.assert_close(found.detach().cpu().double(), wanted.detach(), rtol=3 * unit, atol=bound)


def exactly(tensors):
    return [None if t is None else t.detach().to("cpu", F64).requires_grad_() for t in tensors]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=str)
def test_dense(device, dtype, activation, bias):
    for shape, outputs in SHAPES:
        tensors = make(shape, outputs, dtype, device, bias)
        leaves = [t for t in tensors if t is not None]
        y = op.dense_forward(*tensors, activation)[0]
        g = lists.random(dtype, device, (y.shape,), seed=9)[0]
        assert y.dtype == dtype and y.is_contiguous() and y.shape == (*shape[:-1], outputs)
        wide = exactly(tensors)
        expected = ACTIVATIONS[activation](F.linear(*wide))
        check(y, expected, dtype, shape[-1])
        found = torch.autograd.grad(y, leaves, g)
        wanted = torch.autograd.grad(expected, [t for t in wide if t is not None], g.cpu().double())
        rows = max(1, y.numel() // max(1, outputs))
        for a, b in zip(found, wanted, strict=True):
            check(a, b, dtype, outputs + rows)
        again = torch.autograd.grad(op.dense_forward(*tensors, activation)[0], leaves, g)
        lists.assert_same_bits(found, again)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=str)
def test_dense_gelu_dense(device, dtype):
    for (shape, hidden), outputs in zip(SHAPES, (4, 6, 24, 8, 5, 3, 2), strict=True):
        for bias in (True, False):
            first = make(shape, hidden, dtype, device, bias)
            second = make((*shape[:-1], hidden), outputs, dtype, device, bias)[1:]
            tensors = (*first, *second)
            leaves = [t for t in tensors if t is not None]
            y = op.dense_gelu_dense_forward(*tensors)[0]
            g = lists.random(dtype, device, (y.shape,), seed=9)[0]
            x, w1, b1, w2, b2 = wide = exactly(tensors)
            expected = F.linear(F.gelu(F.linear(x, w1, b1), approximate="tanh"), w2, b2)
            check(y, expected, dtype, shape[-1] + hidden)
            found = torch.autograd.grad(y, leaves, g)
            wanted = torch.autograd.grad(expected, [t for t in wide if t is not None], g.cpu().double())
            for a, b in zip(found, wanted, strict=True):
                check(a, b, dtype, hidden + outputs + max(1, y.numel()))


@pytest.mark.parametrize("device", DEVICES)
def test_layouts(device):
    """Transposed, cut, expanded and misaligned tensors count by their values."""
    for dtype in (F32, BF16):
        x, w, b = (t.detach() for t in make((8, 16), 24, dtype, device))
        g = lists.random(dtype, device, ((8, 24),), seed=9)[0]
        plain = [*op.dense_forward(x, w, b, "gelu"), *op.dense_backward(g, x, w, b, g, "relu")]
        for change in (
            lambda t: t.t().contiguous().t() if t.dim() == 2 else t,
            lambda t: torch.stack((t, t), -1)[..., 0],
        ):
            x_, w_, b_, g_ = map(change, (x, w, b, g))
            found = [*op.dense_forward(x_, w_, b_, "gelu"), *op.dense_backward(g_, x_, w_, b_, g_, "relu")]
            for one, other in zip(found, plain, strict=True):
                check(one, other.cpu().double(), dtype, 24)
        off = lists.misaligned([x])[0]
        check(op.dense_forward(off, w, b)[0], op.dense_forward(x, w, b)[0].cpu().double(), dtype, 16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_that_nobody_wants_are_not_made(device, activation):
    x, w, b = make((8, 16), 24, BF16, device)
    g = lists.random(BF16, device, ((8, 24),), seed=9)[0]
    every = torch.autograd.grad(op.dense_forward(x, w, b, activation)[0], (x, w, b), g)
    for i in range(3):
        tensors = [t if i == j else t.detach() for j, t in enumerate((x, w, b))]
        (one,) = torch.autograd.grad(op.dense_forward(*tensors, activation)[0], tensors[i], g)
        torch.testing.assert_close(one, every[i], rtol=2**-7, atol=2**-6)
    kept = g
    none = op.dense_backward(g, x.detach(), w.detach(), b.detach(), kept, activation, False, False, False)
    assert [t.numel() for t in none] == [0, 0, 0]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_gradients(activation):
    tensors = make((3, 4), 5, F64, "cpu")
    run = lambda *t: op.dense_forward(*t, activation)[0]  # noqa: E731
    for arguments in (tensors, tensors[:2]):
        assert torch.autograd.gradcheck(lambda *t: run(*t, *(None,) * (3 - len(t))), arguments)
        assert torch.autograd.gradgradcheck(lambda *t: run(*t, *(None,) * (3 - len(t))), arguments)


def test_gradients_of_gradients_of_two():
    tensors = (*make((3, 4), 5, F64, "cpu"), *make((3, 5), 2, F64, "cpu")[1:])
    run = lambda *t: op.dense_gelu_dense_forward(*t)[0]  # noqa: E731
    assert torch.autograd.gradcheck(run, tensors)
    assert torch.autograd.gradgradcheck(run, tensors)


def test_autocast():
    tensors = make((3, 4), 5, F32, "cpu")
    with torch.autocast("cpu", BF16):
        one = op.dense_forward(*tensors)[0]
        two = op.dense_gelu_dense_forward(*tensors, *make((3, 5), 2, F32, "cpu")[1:])[0]
    assert one.dtype == two.dtype == BF16
    assert torch.autograd.grad(one.sum(), tensors[1])[0].dtype == F32


def test_a_backward_under_an_autocast():
    """What the op is given is what it computes in, by whomever it is called."""
    x, w, b = (t.detach() for t in make((3, 4), 5, F32, "cpu"))
    g, main_grad = torch.ones(3, 5, dtype=F32, device="cpu"), torch.zeros(2, 5, 4, dtype=F32, device="cpu")

    def run(main_grad):
        two = op.dense_gelu_dense_backward(g, x, w, b, torch.eye(5, dtype=F32, device="cpu"), b, g, g)
        op.wgrad_gemm_accum(x, g, main_grad)
        return *op.dense_backward(g, x, w, b, g, "gelu"), *two, main_grad

    wanted = run(main_grad[0])
    with torch.autocast("cpu", BF16):
        lists.assert_same_bits(run(main_grad[1]), wanted)


@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_slopes_far_from_zero(activation, dtype):
    """1 - sigmoid(x) is nothing where its logarithm is not, and infinity times nothing is no slope."""
    x = torch.tensor([-6e4, -100, -20, -8, 0.5, 8, 20, 100, 6e4], dtype=dtype, device="cpu").unsqueeze(1)
    wide = x.double().requires_grad_()
    (wanted,) = torch.autograd.grad(ACTIVATIONS[activation](wide).sum(), wide)
    if activation == "sigmoid":  # torch's is y (1 - y)
        wanted = (wide.sigmoid() * (-wide).sigmoid()).detach()
    one = torch.ones(1, 1, dtype=dtype, device="cpu")
    given = x.clone().requires_grad_()
    y = op.dense_forward(given, one, None, activation)[0]
    (found,) = torch.autograd.grad(y, given, torch.ones_like(y), retain_graph=True)
    least = torch.finfo(dtype).smallest_normal if activation == "sigmoid" else 1e-7
    torch.testing.assert_close(found.double(), wanted, rtol=8 * lists.ROUNDING[dtype], atol=least)
    (again,) = torch.autograd.grad(y, given, torch.ones_like(y), create_graph=True)
    torch.testing.assert_close(again.double(), wanted, rtol=8 * lists.ROUNDING[dtype], atol=least)
    if activation in ("sigmoid", "gelu") and dtype in (F32, F64):
        (second,) = torch.autograd.grad(again.sum(), given)
        assert second.isfinite().all()


WITHOUT_PYTHON = """
import sys

import torch
from apex.fused_dense import FusedDense, FusedDenseGeluDense, accumulate_weight_gradient
from apex.mlp import MLP

x = torch.ones(3, 8, requires_grad=True)
layers = [MLP([8, 4], bias, name) for name in ("none", "relu", "sigmoid") for bias in (True, False)]
for layer in [FusedDense(8, 4), FusedDense(8, 4, bias=False), FusedDenseGeluDense(8, 4, 8), *layers]:
    layer(x).sum().backward()
accumulate_weight_gradient(x.detach(), torch.ones(3, 2), torch.zeros(2, 8))
print([name for name in sys.modules if name.startswith("apex.reference") and ("dense" in name or "wgrad" in name)])
"""


def test_torchs_products_are_called_without_python():
    """The reference, which is in Python, took 70 us of the host for a product of 3."""
    environment = {**os.environ, "APEX_BINDING": "exact"}
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT_PYTHON], capture_output=True, text=True, timeout=300, env=environment
    )
    assert found.stdout == "[]\n", (found.stdout, found.stderr[-2000:])


def test_opcheck():
    x, w, b = make((3, 4), 5, F32, "cpu")
    g = torch.ones(3, 5, device="cpu", dtype=F32)
    second = make((3, 5), 2, F32, "cpu")[1:]
    for activation in ACTIVATIONS:
        opcheck(op.dense_forward, (x, w, b, activation))
        opcheck(op.dense_backward, (g, x, w, b, g, activation))
    opcheck(op.dense_gelu_dense_forward, (x, w, b, *second))
    opcheck(op.dense_gelu_dense_backward, (g[:, :2], x, w, b, *second, g, g))


def test_refused():
    """Every wrong shape, dtype, device and name, before anything runs."""
    x, w, b = (t.detach() for t in make((3, 4), 5, F32, "cpu"))
    for error, text, arguments in [
        (ValueError, "not 'tanh'", (x, w, b, "tanh")),
        (ValueError, "at least one dimension", (x[0, 0], w, b)),
        (ValueError, r"not \[outputs, 3\]", (x[:, :3], w, b)),
        (ValueError, r"not \[outputs, 4\]", (x, w[0], b)),
        (ValueError, "the weight 5 outputs", (x, w, b[:4])),
        (ValueError, "the weight 5 outputs", (x, w, b[None])),
        (TypeError, "one dtype", (x, w.half(), b)),
        (TypeError, "one dtype", (x, w, b.double())),
        (TypeError, "not Int|torch.int32", (x.int(), w.int(), b.int())),
        (ValueError, "bias is on meta", (x, w, b.to("meta"))),
    ]:
        with pytest.raises(error, match=text):
            op.dense_forward(*arguments)
    g = torch.ones(3, 5, device="cpu", dtype=F32)
    with pytest.raises(ValueError, match="gradient has shape"):
        op.dense_backward(g[:2], x, w, b, g, "relu")
    with pytest.raises(ValueError, match="forward kept has shape"):
        op.dense_backward(g, x, w, b, g[:2], "relu")
    with pytest.raises(TypeError, match="gradient has dtype Half, not Float"):
        op.dense_backward(g.half(), x, w, b, g, "relu")
    with pytest.raises(ValueError, match=r"not \[outputs, 5\]"):
        op.dense_gelu_dense_forward(x, w, b, w, b)
