"""The ops of bias and activation against float64, on everything that can serve them."""

from __future__ import annotations

import activations
import lists
import pytest
import torch
from activations import ACTIVATIONS
from lists import BF16, F16, F32, F64
from torch.library import opcheck

from apex._loader import bindings

bindings.load()
op = torch.ops.apex
# No rows; one element a half; odd; vectors; several blocks of columns; more rows than parts; a vector and a half.
SHAPES = [
    (0, 32),
    (3, 0, 16),
    (3, 2),
    (5, 14),
    (2, 3, 48),
    (40, 16),
    (3, 2112),
    (700, 8),
    (600, 32),
    (2, 24),
    (34,),
]


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=str)
def test_values(variant, dtype, activation, gated):
    """With and without bias; the same input gives the same bits again; no rows give a bias's gradient of zeros."""
    for shape in SHAPES:
        if variant.simt and activation in ("gelu", "quick_gelu") and shape not in SHAPES[2:5]:
            continue  # the same kernels with other constants
        for bias in (dtype, None):
            first = activations.check(shape, dtype, variant.device, bias, activation, gated)
        assert first[0].numel() == 0 or variant.name != "reference" or variant.references
    again = [activations.check((40, 16), dtype, variant.device, dtype, activation, gated) for _ in range(2)]
    lists.assert_same_bits(*again)
    empty = activations.check((0, 32), dtype, variant.device, dtype, activation, gated)
    assert empty[2].eq(0).all() and empty[2].shape == (32,)


@pytest.mark.parametrize("shape", [(2049, 1024), (1, 2049 << 10)], ids=str)
def test_large_tensors(variant, shape):
    """Of these, the bias's gradient is sums of parts that a second kernel adds up; of one row, none are."""
    activations.check(shape, BF16, variant.device, F32, "relu", False)


@pytest.mark.parametrize("dtype, bias", [(BF16, F32), (F16, BF16), (F32, F16)], ids=str)
def test_bias_of_another_dtype(variant, dtype, bias):
    for shape in [(5, 48), (3, 14)]:
        activations.check(shape, dtype, variant.device, bias, "silu", True)


def test_layouts(variant):
    """Transposed, cut and odd inputs and gradients; a gradient from one element."""
    for change in (
        lambda t: t.t().contiguous().t(),
        lambda t: torch.stack((t, t), -1)[..., 0],
        lambda t: lists.misaligned([t])[0],
    ):
        activations.check((6, 32), BF16, variant.device, BF16, "silu", True, change)
    x, bias, g = activations.inputs((4, 16), F32, variant.device, F32, True)
    y = op.bias_activation_forward(x, bias, "silu", True)
    one = torch.autograd.grad(y, (x, bias), g[:1, :1].expand(4, 8), retain_graph=True)
    lists.assert_same_bits(one, torch.autograd.grad(y, (x, bias), g[:1, :1].expand(4, 8).contiguous()))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
def test_far_values(variant, dtype, activation):
    """Far from 0 nothing is nan that has a limit: f goes to x or 0, f' to 1 or 0 (2 x for squared ReLU); the sigmoid
    to 1 or 0, and its slope to 0."""
    far = torch.tensor(
        [float("inf"), -float("inf"), 1e30, -1e30, 300.0, -300.0, 88.0, -90.0, 0.0], dtype=dtype, device="cpu"
    )
    x = far.to(variant.device).requires_grad_()
    y = op.bias_activation_forward(x, None, activation, False)
    (slope,) = torch.autograd.grad(y, x, torch.ones_like(y))
    positive, at_zero = far.double().clamp_min(0), torch.where(far == 0, 0.5, far > 0)
    limit = {"squared_relu": positive.square(), "sigmoid": at_zero}.get(activation, positive).to(dtype)
    torch.testing.assert_close(y.cpu(), limit, rtol=0, atol=1e-30)
    steep = {"squared_relu": 2 * positive, "relu": far > 0, "sigmoid": 0.25 * (far == 0)}.get(
        activation, at_zero
    )
    torch.testing.assert_close(slope.cpu(), steep.to(dtype), rtol=0, atol=1e-30)
    nan = op.bias_activation_forward(torch.full_like(x, float("nan")), None, activation, False)
    assert nan.isnan().all()


def test_gradients_that_nobody_wants_are_not_made(variant):
    x, bias, g = activations.inputs((6, 32), F32, variant.device, F32, True)
    both = torch.autograd.grad(op.bias_activation_forward(x, bias, "silu", True), (x, bias), g)
    of_x = torch.autograd.grad(op.bias_activation_forward(x, bias.detach(), "silu", True), x, g)
    of_bias = torch.autograd.grad(op.bias_activation_forward(x.detach(), bias, "silu", True), bias, g)
    lists.assert_same_bits(both, (*of_x, *of_bias))
    assert op.bias_activation_backward(g, x.detach(), bias.detach(), "silu", True, False)[1].numel() == 0


@pytest.mark.gpu
def test_huge():
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    x = torch.ones(2**20 + 3, 2064, device="cuda", dtype=BF16).requires_grad_()
    bias = torch.ones(2064, device="cuda", dtype=F32).requires_grad_()
    y = op.bias_activation_forward(x, bias, "silu", True)
    assert torch.equal(y[-5:], y[:5])
    gx, gb = torch.autograd.grad(y, (x, bias), torch.ones((), device="cuda", dtype=BF16).expand_as(y))
    assert torch.equal(gx[-5:], gx[:5])
    torch.testing.assert_close(gb, gx[0].float() * x.shape[0], rtol=1e-2, atol=0)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_gradients(activation, gated):
    x, bias, _ = activations.inputs((3, 4), F64, "cpu", F64, gated, scale=1.0)

    def run(x, *bias):
        return op.bias_activation_forward(x, *(bias or (None,)), activation, gated)

    for arguments in ((x, bias), (x,)):
        assert torch.autograd.gradcheck(run, arguments)
        assert torch.autograd.gradgradcheck(run, arguments)


@pytest.mark.parametrize("bias", [F32, None], ids=str)
def test_opcheck(bias):
    for gated in (True, False):
        x, bias_, g = activations.inputs((3, 5, 16), F32, "cpu", bias, gated)
        opcheck(op.bias_activation_forward, (x, bias_, "silu", gated))
        opcheck(
            op.bias_activation_backward,
            (g, x.detach(), bias_ if bias_ is None else bias_.detach(), "gelu", gated),
        )
        opcheck(op.bias_activation_backward, (g, x, bias_, "gelu", gated))


def test_refused():
    """Every wrong shape, dtype, device and name, before anything runs."""
    x, bias, g = (
        torch.ones(3, 8, dtype=F32, device="cpu"),
        torch.ones(8, dtype=F32, device="cpu"),
        torch.ones(3, 4, dtype=F32, device="cpu"),
    )
    for error, text, arguments in [
        (ValueError, "not 'tanh'", (x, bias, "tanh", True)),
        (ValueError, "which is 7", (x[:, :7], None, "silu", True)),
        (ValueError, "at least one dimension", (x[0, 0], None, "silu", True)),
        (ValueError, r"bias has shape .* not the input's last, \[8\]", (x, bias[:4], "silu", True)),
        (ValueError, r"bias has shape .* not the input's last, \[8\]", (x, bias[None], "silu", True)),
        (ValueError, "meta", (x, bias.to("meta"), "silu", True)),
        (TypeError, "not Int", (x.int(), None, "silu", True)),
        (TypeError, "not Long", (x, bias.long(), "silu", True)),
        (TypeError, "float64 alone", (x, bias.double(), "silu", True)),
        (TypeError, "float64 alone", (x.double(), bias, "silu", True)),
    ]:
        with pytest.raises(error, match=text):
            op.bias_activation_forward(*arguments)
    with pytest.raises(ValueError, match="gradient has shape"):
        op.bias_activation_backward(g[:2], x, bias, "silu", True)
    with pytest.raises(ValueError, match="gradient has shape"):
        op.bias_activation_backward(g, x, bias, "silu", False)
    with pytest.raises(TypeError, match="gradient has dtype Half, not Float"):
        op.bias_activation_backward(g.half(), x, bias, "silu", True)
