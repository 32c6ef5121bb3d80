"""Layer norm and RMS norm in float64, shapes that hurt, and how far a result may be: what their tests share."""

from __future__ import annotations

from dataclasses import dataclass

import lists
import torch
from lists import F64

EPS = 1e-3
# No rows; one element; odd; a vector; one warp; one block; longer than the registers of one; many short rows.
SHAPES = [
    (0, 768),
    (4, 0, 64),
    (3, 1),
    (5, 7),
    (9, 8),
    (2, 3, 72),
    (3, 1000),
    (2, 2056),
    (2, 2055),
    (1, 16392),
]
FEW = [(5, 7), (3, 136), (2, 2056)]


@dataclass(frozen=True)
class Norm:
    """One of the two norms; `weights` are (weight, bias) or (weight,)."""

    name: str
    centered: bool

    def forward(self, x, shape, weights, eps=EPS, memory_efficient=False, dtype=None):
        """The op's output alone, differentiable."""
        op = getattr(torch.ops.apex, f"{self.name}_forward")
        return op(x, shape, *self.both(weights), eps, memory_efficient, dtype)[0]

    def add_forward(self, x, residual, shape, weights, eps=EPS, memory_efficient=False, dtype=None):
        """(output, sum)"""
        op = getattr(torch.ops.apex, f"add_{self.name}_forward")
        return op(x, residual, shape, *self.both(weights), eps, memory_efficient, dtype)[:2]

    def both(self, weights):
        """As the op takes them: None for what is not there."""
        count = 2 if self.centered else 1
        return tuple(weights) if weights else (None,) * count

    def make(self, shape, dtype, device):
        """Weights whose values are not the initial ones, requiring gradients."""
        generator = torch.Generator().manual_seed(7)
        weight = torch.rand(shape, generator=generator, dtype=F64, device="cpu") + 0.5
        bias = torch.randn(shape, generator=generator, dtype=F64, device="cpu")
        made = (weight, bias) if self.centered else (weight,)
        return tuple(t.to(dtype).to(device).requires_grad_() for t in made)

    def exact(self, x, shape, weights, eps=EPS):
        """In float64, differentiable, from torch's elementary ops."""
        dims = tuple(range(-len(shape), 0))
        x = x - x.mean(dims, keepdim=True) if self.centered else x
        y = x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)
        weight, bias = (*self.both(weights), None)[:2]
        y = y if weight is None else y * weight
        return y if bias is None else y + bias


LAYER, RMS = Norm("layer_norm", True), Norm("rms_norm", False)
NORMS = [LAYER, RMS]


def leaf(tensor):
    """A copy in float64 on the CPU, requiring gradients."""
    return tensor.detach().to("cpu", F64).requires_grad_()


def random(shape, dtype, device, seed=1):
    return lists.random(dtype, device, (shape,), seed=seed)[0]


def check(norm, x, shape, weights, memory_efficient=False, dtype=None, run=None):
    """Forward and backward against float64; returns (output, gradients)."""
    x = x.detach().requires_grad_()
    y = (run or norm.forward)(x, shape, weights, EPS, memory_efficient, dtype)
    assert y.dtype == (dtype or x.dtype) and y.shape == x.shape and y.is_contiguous()
    gradient = random(y.shape, y.dtype, y.device, seed=3)
    leaves = [x, *weights]
    found = torch.autograd.grad(y, leaves, gradient)
    wide = [leaf(t) for t in leaves]
    expected = norm.exact(wide[0], shape, wide[1:])
    wanted = torch.autograd.grad(expected, wide, gradient.detach().cpu().double())
    near(y, expected, x.dtype, y.dtype)
    for tensor, value in zip(found, wanted, strict=True):
        assert tensor.shape == value.shape
        # What is computed from the output has its rounding, divided by the weight, in every element.
        near(tensor, value, x.dtype, y.dtype, loose=40 if memory_efficient else 1)
    return y, found


def near(found, expected, *dtypes, loose=1):
    """Within a rounding of the tensor's dtype, and some of the arithmetic (or, if loose, of the dtypes), relative
    to the largest value: sums cancel."""
    expected = expected.detach()
    if not expected.numel():
        return
    own, work = lists.ROUNDING[found.dtype], lists.ROUNDING[lists.math_dtype(found.dtype, *dtypes)]
    roughest = max([own, *(lists.ROUNDING[d] for d in dtypes)]) if loose > 1 else work
    scale = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(
        found.detach().cpu().double(),
        expected,
        rtol=1.01 * own + 8 * work,
        atol=scale * (64 * work + (loose * roughest if loose > 1 else 0)),
    )
