"""Rotary embeddings in float64, and cases that hurt: what the tests of the op and of its Python face share."""

from __future__ import annotations

from dataclasses import dataclass

import lists
import torch
from lists import BF16, F16, F32, F64


def rotate(x, cos, sin):
    """All of the last dimension, rotate-half pairing, from torch's elementary ops."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def exact(x, cos, sin=None, cos_w=None, sin_w=None, cu_seqlens=None):
    """The op in float64, differentiable in x; a loop over sequences, none over heads."""
    r = cos.shape[-1]
    cos, sin = (cos.cos(), cos.sin()) if sin is None else (cos, sin)
    if cos_w is not None:
        h, w = x.shape[1:3]
        return torch.cat(
            (
                rotate(x[..., :r], cos[:, :h, None], sin[:, :h, None]),
                rotate(x[..., r:], cos_w[:, None, :w], sin_w[:, None, :w]),
            ),
            -1,
        )
    if cu_seqlens is not None:
        ends = cu_seqlens.tolist()
        parts = [
            exact(x[a:b, None], cos[: b - a], sin[: b - a])[:, 0]
            for a, b in zip(ends, ends[1:], strict=False)
        ]
        return torch.cat((*parts, x[ends[-1] :]))
    return torch.cat((rotate(x[..., :r], cos, sin), x[..., r:]), -1)


@dataclass(frozen=True)
class Case:
    """Shapes and dtypes of one call.

    form: "freqs", "cached", "thd" or "2d". shape: the input's. rotary: elements of a head that turn (of images, all).
    layout: how the input and its gradient lie: "plain", "swapped" (first two dimensions), "elements" (the last two),
    "odd" (one element past an allocation), "broadcast" (the gradient, from one element).
    """

    form: str
    shape: tuple[int, ...]
    rotary: int
    dtype: torch.dtype = F32
    angles: torch.dtype = F32
    layout: str = "plain"
    transpose_output: bool = False
    ends: tuple[int, ...] = ()

    def __str__(self):
        names = [
            self.form,
            "x".join(map(str, self.shape)),
            str(self.rotary),
            str(self.dtype)[6:],
            str(self.angles)[6:],
        ]
        return "-".join([*names, self.layout, *(["transposed"] if self.transpose_output else [])])

    def laid_out(self, values, device):
        values = values.to(device, self.dtype)
        if self.layout == "swapped":
            return values.transpose(0, 1).contiguous().transpose(0, 1)
        if self.layout == "elements":
            return values.transpose(-1, -2).contiguous().transpose(-1, -2)
        if self.layout == "odd":
            return lists.misaligned([values])[0]
        return values

    def tables(self, device):
        """The op's arguments after the input, but the last."""
        generator = torch.Generator().manual_seed(5)

        def angles(*shape):
            return (torch.rand(shape, generator=generator, dtype=F64, device="cpu") * 40 - 20).to(self.angles)

        if self.form == "2d":
            height, width = self.shape[1:3]
            tables = [angles(1, n + 1, 1, self.rotary) for n in (height, width)]
            return tuple(f(t).to(device) for t in tables for f in (torch.cos, torch.sin))
        ends = torch.tensor(self.ends, dtype=torch.int32, device="cpu") if self.form == "thd" else None
        places = (
            max((b - a for a, b in zip(self.ends, self.ends[1:], strict=False)), default=0) + 1
            if self.ends
            else self.shape[0]
        )
        freqs = angles(places, 1, 1, self.rotary)
        if self.form == "cached":
            return freqs.cos().to(device), freqs.sin().to(device)
        if ends is None:
            return (freqs.to(device),)
        return (freqs.to(device), None, None, None, ends.to(device))


CASES = [
    Case("freqs", (5, 2, 3, 64), 64, BF16),  # vectors of 8
    Case("freqs", (5, 2, 3, 64), 64, F16, F16, layout="swapped", transpose_output=True),
    Case("freqs", (4, 1, 3, 72), 32, BF16, BF16),  # half of the head is copied, by an odd number of vectors
    Case("freqs", (4, 2, 3, 20), 8, F16),  # vectors of 4 halves
    Case("freqs", (9, 1, 2, 24), 16, F32, F64),
    Case("freqs", (3, 3, 1, 10), 6, F32, F16, layout="elements"),
    Case("freqs", (2, 1, 2, 64), 64, BF16, layout="odd"),
    Case("freqs", (70, 1, 1, 8), 8, F32),  # many positions of one block
    Case("freqs", (1, 5, 41, 16), 16, BF16),  # many rows of one position
    Case("freqs", (2, 2, 3, 12), 0, F32),  # nothing turns
    Case("freqs", (3, 2, 2, 6), 4, F64, F64),
    Case("freqs", (2, 1, 2, 2100), 2060, F64),  # more than a table in shared memory holds
    Case("freqs", (2, 1, 1, 4200), 4160, F16),
    Case("freqs", (0, 2, 3, 16), 16),
    Case("freqs", (4, 0, 3, 16), 16, BF16),
    Case("cached", (5, 2, 3, 64), 64, BF16, F32, transpose_output=True),
    Case("cached", (5, 2, 3, 40), 16, F32, BF16, layout="swapped"),
    Case("cached", (3, 1, 2, 7), 2, F16, layout="broadcast"),
    Case("cached", (3, 2, 2, 6), 6, F64, F32),
    Case("thd", (11, 3, 64), 64, BF16, ends=(0, 4, 4, 5, 11)),
    Case("thd", (11, 3, 16), 8, F32, ends=(0, 2, 9), layout="elements"),  # two places of padding
    Case("thd", (40, 1, 8), 8, F16, ends=(0, 33, 40)),
    Case("thd", (70, 1, 32), 32, BF16, ends=(0, 1, *range(2, 60))),  # as many sequences as places, almost
    Case("thd", (9, 40, 128), 64, F16, ends=(0, 3, 3, 8)),
    Case("thd", (5, 2, 8), 4, F32, ends=(0,)),  # no sequence: all is padding
    Case("thd", (6, 2, 6), 6, F64, F64, ends=(0, 1, 6)),
    Case("2d", (2, 3, 4, 2, 64), 32, BF16),
    Case("2d", (1, 5, 2, 3, 16), 8, F16, F32, layout="elements"),
    Case("2d", (2, 2, 3, 1, 12), 6, F32, BF16),
    Case("2d", (1, 2, 2, 2, 8), 4, F64, F64),
]


def near(found, expected):
    """Within a rounding to the dtype and a few of the arithmetic."""
    expected = expected.detach()
    own, work = lists.ROUNDING[found.dtype], lists.ROUNDING[lists.math_dtype(found.dtype)]
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(
        found.detach().cpu().double(),
        expected,
        rtol=1.01 * own,
        atol=8 * work * scale + lists.SMALLEST[found.dtype],
    )


def check(case, device):
    """Forward, backward and the backward's own gradient against float64; returns what was found."""
    x = case.laid_out(lists.random(F64, "cpu", (case.shape,), seed=1)[0], device).requires_grad_()
    tables = case.tables(device)
    arguments = (*tables, *(None,) * (5 - len(tables)), case.transpose_output)
    y = torch.ops.apex.rope_forward(x, *arguments)
    assert y.shape == x.shape and y.dtype == x.dtype
    assert (y.transpose(0, 1) if case.transpose_output else y).is_contiguous()
    g = case.laid_out(lists.random(F64, "cpu", (case.shape,), seed=2)[0], device)
    if case.layout == "broadcast":
        g = g.flatten()[:1].reshape((1,) * x.dim()).expand(case.shape)
    g = g.requires_grad_()
    (dx,) = torch.autograd.grad(y, x, g, create_graph=True)
    v = case.laid_out(lists.random(F64, "cpu", (case.shape,), seed=3)[0], device)
    (dg,) = torch.autograd.grad(dx, g, v)

    wide = [t.detach().cpu().double().requires_grad_() for t in (x, g)]
    wide_tables = [t if t is None or t.dtype == torch.int32 else t.cpu().double() for t in tables]
    expected = exact(wide[0], *(t.cpu() if t is not None else None for t in wide_tables))
    near(y, expected)
    near(dx, torch.autograd.grad(expected, wide[0], wide[1], retain_graph=True)[0])
    near(dg, exact(v.detach().cpu().double(), *(t.cpu() if t is not None else None for t in wide_tables)))
    return y, dx, dg
