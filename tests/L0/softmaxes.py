"""Masked softmax in float64, and how far a result may be: what the softmax tests share."""

from __future__ import annotations

import lists
import torch
from lists import F64

SCALE = 0.3
# The smallest normal float32 and float64: exponentials of GPUs give 0 below it, and its divisions are coarse.
FLUSHED = (2.0**-126, 2.0**-1022)


def forward(x, mask=None, scale=SCALE, causal=False):
    """The op, differentiable."""
    return torch.ops.apex.scaled_masked_softmax_forward(x, mask, scale, causal)


def upper(x):
    """True past the diagonal that ends in the last row's last element."""
    queries, keys = x.shape[-2:]
    return torch.ones(queries, keys, dtype=torch.bool, device="cpu").triu(keys - queries + 1)


def exact(x, mask=None, scale=SCALE, causal=False):
    """In float64 on the CPU, differentiable; rows that keep nothing are zeros."""
    x = x.detach().cpu().to(F64) if x.dtype != F64 or x.device.type != "cpu" else x
    x = x * scale
    left_out = torch.zeros(x.shape, dtype=torch.bool, device="cpu")
    if mask is not None:
        left_out = left_out | mask.cpu().bool()
    if causal:
        left_out = left_out | upper(x)
    x = x.masked_fill(left_out, -torch.inf)
    # Not torch.softmax, which adds up long rows of doubles term by term on some processors.
    powers = (x - x.amax(-1, keepdim=True).detach()).exp() if x.shape[-1] else x
    y = powers / powers.sum(-1, keepdim=True)
    return y.masked_fill(left_out.all(-1, keepdim=True), 0.0).masked_fill(left_out & y.isfinite(), 0.0)


def exact_gradient(y, dy, scale=SCALE):
    """Of the input, from the output that the op gave: float64."""
    y, dy = y.detach().cpu().to(F64), dy.detach().cpu().to(F64)
    return scale * y * (dy - (y * dy).sum(-1, keepdim=True))


def near(found, expected, exponent=0.0):
    """Within a rounding of the dtype and some of the arithmetic, element by element; exponent: the largest
    |scale * x| of the input, whose rounding shows in the result relatively."""
    own, work = lists.ROUNDING[found.dtype], lists.ROUNDING[lists.math_dtype(found.dtype)]
    smallest = max(lists.SMALLEST[found.dtype], FLUSHED[found.dtype == F64])
    tolerance = (1.01 * own + (16 + 4 * exponent) * work) * expected.abs() + smallest
    _within(found, expected, tolerance)


def near_gradient(found, y, dy, scale=SCALE):
    """Likewise, of the gradient that the backward makes of y and dy; its terms cancel."""
    expected = exact_gradient(y, dy, scale)
    y, dy = y.detach().cpu().to(F64), dy.detach().cpu().to(F64)
    own, work = lists.ROUNDING[found.dtype], lists.ROUNDING[lists.math_dtype(found.dtype)]
    terms = abs(scale) * y * (dy.abs() + (y * dy).abs().sum(-1, keepdim=True))
    smallest = max(lists.SMALLEST[found.dtype], FLUSHED[found.dtype == F64])
    _within(found, expected, 1.01 * own * expected.abs() + 16 * work * terms + smallest)


def _within(found, expected, tolerance):
    found, expected = found.detach().cpu().to(F64), expected.detach()
    assert torch.equal(found.isnan(), expected.isnan())
    error = (found - expected).abs()
    worst = (error - tolerance).nan_to_num(-1.0)
    assert not worst.numel() or worst.max() <= 0, (
        f"off by {error.flatten()[worst.argmax()]:.3e}, more than {tolerance.flatten()[worst.argmax()]:.3e}, "
        f"at {worst.argmax().item()} of {tuple(expected.shape)} where {expected.flatten()[worst.argmax()]:.3e} is right"
    )


def random(shape, dtype, device, seed=1, scale=3.0):
    return lists.random(dtype, device, (shape,), seed=seed, scale=scale)[0]


def random_mask(shape, device, seed=5, part=0.4):
    """Bool, true at about this part of its elements; its first row is all true."""
    mask = (
        torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu")
        < part
    )
    mask.view(-1, shape[-1])[0] = True
    return mask.to(device)


def check(x, mask=None, scale=SCALE, causal=False, run=forward):
    """Forward and backward against float64; returns (output, gradient)."""
    x = x.detach().requires_grad_()
    y = run(x, mask, scale, causal)
    assert y.dtype == x.dtype and y.shape == x.shape and y.is_contiguous()
    dy = random(y.shape, y.dtype, y.device, seed=3, scale=1.0)
    before = dy.clone()
    (dx,) = torch.autograd.grad(y, x, dy)
    near(y, exact(x, mask, scale, causal), float((x.detach().abs().max() * abs(scale)) if x.numel() else 0))
    near_gradient(dx, y, dy, scale)
    assert torch.equal(dy, before), "the caller's gradient was written"
    return y, dx
