"""Batch norm's ops in float64, tensors whose channels lie in every way, and how far a result may be."""

from __future__ import annotations

import lists
import torch
from lists import BF16, F16, F32, F64

DTYPES = (F32, F16, BF16, F64)
# Name -> how the channels lie: second or last dimension, and in memory.
FIRST = {
    "odd": (2, 3, 5, 7),
    "vectors": (3, 4, 8, 8),
    "segments that begin between vectors": (5, 16, 14, 14),
    "shorter than a vector": (9, 5, 3),
    "several parts": (130, 2, 88),
    "one long segment": (1, 3, 5000),
    "five dimensions": (2, 2, 3, 4, 5),
    "two dimensions": (8, 4),
    "one element an image": (40, 24, 1, 1),
    "no batch": (0, 3, 4, 4),
    "no channels": (2, 0, 5),
    "one of each": (2, 1, 1),
}
LAST = {
    "vectors": (7, 5, 16),
    "several parts": (1100, 8),
    "fewer rows than a block has lanes": (3, 64),
    "odd": (9, 33),
    "several blocks side by side": (5, 200),
    "more odd channels than a block takes": (6, 131),
}
SOME = [
    ("first", FIRST["odd"]),
    ("first", FIRST["vectors"]),
    ("last", LAST["vectors"]),
    ("last", LAST["odd"]),
    ("memory", (2, 24, 3, 5)),
    ("memory", (2, 16, 2, 3, 2)),
]
EVERY = [("first", s) for s in FIRST.values()] + [("last", s) for s in LAST.values()] + SOME[-2:]


def laid_out(layout, shape, dtype, device, seed=1, scale=1.0):
    """Normal values; "memory": in torch.channels_last of their dimensions."""
    x = lists.random(dtype, device, (shape,), scale=scale, seed=seed)[0]
    if layout == "memory":
        x = x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    return x


class Case:
    """One input with what belongs to it, and all of it in float64: `x64`, `weight64`, ..."""

    def __init__(self, layout, shape, dtype, device, weight_dtype=None, affine=True, mean=0.5):
        self.last = layout == "last"
        self.axis = len(shape) - 1 if self.last or len(shape) == 2 else 1
        self.over = [d for d in range(len(shape)) if d != self.axis]
        self.wide = [-1 if d == self.axis else 1 for d in range(len(shape))]
        self.channels = shape[self.axis]
        math = lists.math_dtype(dtype)
        self.x = laid_out(layout, shape, dtype, device) * 2 + mean
        self.dy, self.z = (laid_out(layout, shape, dtype, device, seed=s) for s in (2, 3))
        self.weight = self.shift = None
        if affine:
            self.weight, self.shift = (
                lists.random(weight_dtype or dtype, device, ((self.channels,),), seed=s)[0] for s in (4, 5)
            )
        for name in ("x", "dy", "z", "weight", "shift"):
            tensor = getattr(self, name)
            setattr(self, f"{name}64", None if tensor is None else lists.exact([tensor])[0])
        count = self.x.numel() // self.channels if self.channels else 0
        if count:
            mean, var = self.x64.mean(self.over), self.x64.var(self.over, unbiased=False)
        else:
            mean = var = torch.zeros(self.channels, dtype=F64, device="cpu")
        # As ops are given them: rounded.
        self.mean, self.inv_std = (t.to(math).to(device) for t in (mean, (var + 1e-3).rsqrt()))
        self.var64, self.count = var, count
        self.mean64, self.inv_std64 = lists.exact([self.mean, self.inv_std])

    def spread(self, per_channel):
        """[channels] as it broadcasts against x."""
        return per_channel.view(self.wide)

    def forward(self, z=True, relu=True):
        """batchnorm_forward in float64."""
        y = (self.x64 - self.spread(self.mean64)) * self.spread(self.inv_std64)
        if self.weight is not None:
            y = y * self.spread(self.weight64) + self.spread(self.shift64)
        y = y + self.z64 if z else y
        return y.relu() if relu else y


def near(found, expected, math=None, loose=1.0):
    """Within a rounding to the dtype and some of the arithmetic, relative to the largest value: sums cancel."""
    own, work = lists.ROUNDING[found.dtype], lists.ROUNDING[math or lists.math_dtype(found.dtype)]
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(
        found.detach().cpu().double(),
        expected,
        rtol=1.01 * own + 8 * work * loose,
        atol=lists.SMALLEST[found.dtype] + 32 * work * scale * loose,
        equal_nan=True,
    )
