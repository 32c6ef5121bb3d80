"""Bias and activation in float64, from torch's own activations: what the tests of op and Python face share."""

from __future__ import annotations

import lists
import torch
import torch.nn.functional as F
from lists import F64

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "squared_relu": lambda x: F.relu(x).square(),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
}


def exact(x, bias, activation, gated):
    """Differentiable, in the dtype of x."""
    u = x if bias is None else x + bias
    if not gated:
        return ACTIVATIONS[activation](u)
    first, second = u.chunk(2, -1)
    return ACTIVATIONS[activation](first) * second


def near(found, expected, rows=1):
    """Within a rounding to the dtype and some of the arithmetic; rows: how many values a sum has."""
    expected = expected.detach()
    own, work = lists.ROUNDING[found.dtype], lists.ROUNDING[lists.math_dtype(found.dtype)]
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(
        found.detach().cpu().double(),
        expected,
        rtol=1.01 * own + 16 * work,
        atol=(16 + rows) * work * scale + lists.SMALLEST[found.dtype],
    )


def inputs(shape, dtype, device, bias_dtype, gated, scale=2.0):
    """(input, bias or None, gradient of the output), the first two requiring gradients."""
    hidden = shape[-1] // 2 if gated else shape[-1]
    x, g = (
        lists.random(dtype, device, (s,), scale=scale, seed=i)
        for i, s in ((1, shape), (2, (*shape[:-1], hidden)))
    )
    bias = (
        None
        if bias_dtype is None
        else lists.random(bias_dtype, device, (shape[-1:],), seed=3)[0].requires_grad_()
    )
    return x[0].requires_grad_(), bias, g[0]


def check(shape, dtype, device, bias_dtype, activation, gated, change=lambda t: t):
    """Forward and backward against float64; returns what was found. change: how input and gradient lie."""
    x, bias, g = inputs(shape, dtype, device, bias_dtype, gated)
    x, g = change(x.detach()).requires_grad_(), change(g)
    y = torch.ops.apex.bias_activation_forward(x, bias, activation, gated)
    assert y.dtype == dtype and y.is_contiguous() and y.shape == g.shape
    leaves = [x] if bias is None else [x, bias]
    found = torch.autograd.grad(y, leaves, g)
    wide = [t.detach().to("cpu", F64).requires_grad_() for t in leaves]
    expected = exact(wide[0], wide[1] if bias is not None else None, activation, gated)
    wanted = torch.autograd.grad(expected, wide, g.cpu().double())
    near(y, expected)
    near(found[0], wanted[0])
    if bias is not None:
        assert found[1].dtype == bias.dtype
        near(found[1], wanted[1], rows=max(1, x.numel() // max(1, x.shape[-1])))
    return [y, *found]
