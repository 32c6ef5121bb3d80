"""masked_softmax_dropout kernels against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from apex.reference import _philox
from simt.element_types import DTYPES, ROUNDING, decode, encode
from simt.structs import make

TYPE = {"f32": 0, "f16": 1, "bf16": 2, "f64": 3}
HEADER = "scaled_masked_softmax.h"
HEADS, SEED, DROPOUT = 2, 2**61 + 977, 0.3
KEEP, SCALE = round((1 - DROPOUT) * 2**32), 1 / (1 - DROPOUT)


@dataclass(frozen=True)
class Case:
    """One shape and the kernel that takes it.

    kernel: the name's end. mask: none, bytes (of each batch's keys), time (of each query's) or added (numbers).
    lanes: as a power of two, -1 for a block. warps: of a block.
    """

    kernel: str
    rows: int
    keys: int
    mask: str = "none"
    lanes: int = -1
    warps: int = 2
    grid: int = 2
    queries: int = 1
    dropout: bool = True
    stores: bool = False

    @property
    def type(self) -> str:
        return next((name for name in ("bf16", "f16", "f32", "f64") if name in self.kernel), "f16")

    def __str__(self) -> str:
        return f"{self.kernel}-{self.rows}x{self.keys}-{self.mask}" + "-plain" * (not self.dropout)


CASES = [
    Case("f16x1", 11, 24, "bytes", lanes=2),  # four lanes a row, the last rows not there
    Case("bf16x1", 5, 256, "added", lanes=5, stores=True),
    Case("f32x1", 9, 64, "time", lanes=4, queries=3, stores=True),
    Case("f16x2w1", 5, 512, "bytes", lanes=5),
    Case("bf16x2w1", 3, 424, "added", lanes=5, stores=True),
    Case("f32x2w1", 3, 252, lanes=5),
    Case("f16x4w1", 3, 1000, "added", lanes=5),
    Case("bf16x4w1", 3, 1024, "time", lanes=5, queries=2, dropout=False),
    Case("f32x4w1", 3, 500, "bytes", lanes=5, stores=True),
    Case("bf16x4", 3, 2096, "bytes", warps=3, stores=True),
    Case("f16x4", 3, 2056, "added", warps=3),
    Case("f32x4", 3, 1028, "time", queries=2, warps=3),
    Case("odd_f16x1", 23, 7, "bytes", lanes=1, stores=True),
    Case("odd_bf16x1", 9, 39, "added", lanes=3),
    Case("odd_f32x1", 5, 33, "time", lanes=4, queries=3, stores=True),
    Case("odd_f16x4", 4, 601, "added", stores=True),
    Case("odd_bf16x4", 4, 603, "bytes"),
    Case("odd_f32x4", 3, 259, "added", lanes=5, stores=True),
    Case("long_f16", 3, 1203, "added", stores=True),
    Case("long_bf16", 3, 1200, "bytes"),
    Case("long_f32", 3, 518, "added", stores=True),
    Case("long_any", 3, 67, "added", stores=True),
    Case("long_f64", 4, 67, "bytes", stores=True),
    Case("long_f64", 3, 35, "added", dropout=False),
]


class Tensors:
    """The case's tensors, and what the kernels must make of them in float64."""

    def __init__(self, device, case: Case):
        self.device, self.case = device, case
        rng = np.random.default_rng(case.keys)
        shape = (case.rows, case.keys)

        def values(*of, scale=1.0):
            return decode(encode(scale * rng.standard_normal(of), case.type), case.type)

        self.x, self.grad = values(*shape, scale=3.0), values(*shape)
        groups = -(-case.rows // case.queries)
        of_mask = (case.queries if case.mask == "time" else -(-groups // HEADS), case.keys)
        self.bytes = (rng.random(of_mask) < 0.3).astype(np.uint8) * 5
        self.bytes[-1] = 1
        self.added = np.where(self.bytes > 0, -np.inf, values(*of_mask, scale=2.0))
        row = np.arange(case.rows)
        at = row % case.queries if case.mask == "time" else row // case.queries // HEADS
        left_out = (self.bytes[at] > 0) & (case.mask != "none")
        z = self.x + (np.where(left_out, 0, self.added[at]) if case.mask == "added" else 0)
        with np.errstate(invalid="ignore"):
            z = np.where(left_out, -np.inf, z)
            p = np.exp(z - z.max(1, keepdims=True))
            self.y = np.where(left_out.all(1, keepdims=True), 0, p / p.sum(1, keepdims=True))
        counter = torch.arange(-(-case.rows * case.keys // 8), dtype=torch.int64, device="cpu")
        bits = _philox.keep_eight_finely(torch.tensor(SEED, device="cpu"), counter, KEEP).flatten()
        self.kept = bits[: case.rows * case.keys].view(shape).numpy()

    def put(self, values):
        return self.device.put(encode(values, self.case.type))

    def empty(self):
        return self.put(np.full((self.case.rows, self.case.keys), 7.0))

    def mask(self):
        case = self.case
        if case.mask == "none":
            return {}
        of = self.put(self.added) if case.mask == "added" else self.device.put(self.bytes)
        step = case.keys * (DTYPES[case.type].itemsize if case.mask == "added" else 1)
        stride = dict(mask_query=step) if case.mask == "time" else dict(mask_batch=step)
        return dict(mask=of, additive=case.mask == "added", **stride)

    def launch(self, name, **more):
        c, struct = self.case, f"Softmax{name.title()}"
        key = self.device.put(np.array([SEED], dtype=np.int64))
        common = dict(rows=c.rows, keys=c.keys, queries=c.queries, type=TYPE[c.type], lanes=c.lanes)
        if c.dropout and more.get("seed") != 0:
            common |= dict(seed=key, keep=KEEP)
        more = {k: v for k, v in more.items() if k != "seed"}
        block = c.warps * self.device.warp_size
        arguments = make(struct, HEADER, **common, **more)
        self.device.launch(f"masked_softmax_dropout_{name}_{c.kernel}", c.grid, block, [arguments], 0)


def _near(found, name, expected, terms):
    work = ROUNDING["f64" if name == "f64" else "f32"]
    smallest = 2.0**-25 if name == "f16" else 2.0**-126
    error = np.abs(decode(found, name) - expected)
    assert np.all(error <= 1.01 * ROUNDING[name] * np.abs(expected) + 64 * work * terms + smallest)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(device, case):
    t = Tensors(device, case)
    output, softmax = t.empty(), t.empty()
    kept = device.put(np.full((case.rows, case.keys), 9, np.uint8))
    dropout = dict(softmax=softmax, kept_by=SCALE, kept_scale=SCALE) if case.dropout else {}
    factor = np.float32(1 / math.log(2))
    t.launch(
        "forward", input=t.put(t.x), output=output, heads=HEADS, magnitude=1.0, factor=factor,
        factor_rest=1 / math.log(2) - float(factor), kept=kept if case.stores else 0, **dropout, **t.mask(),
    )  # fmt: skip
    if not case.dropout:
        _near(output.numpy(), case.type, t.y, t.y)
        return
    _near(softmax.numpy(), case.type, t.y, t.y)
    _near(output.numpy(), case.type, t.y * t.kept * SCALE, t.y * SCALE)
    assert np.array_equal(kept.numpy(), t.kept if case.stores else np.full_like(kept.numpy(), 9))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward(device, case):
    t = Tensors(device, case)
    y = decode(encode(t.y, case.type), case.type)
    grad_input = t.empty()
    by = dict(kept=device.put(t.kept.astype(np.uint8) * 3), seed=0) if case.stores else {}
    scale = SCALE if case.dropout else 1.0
    t.launch(
        "backward",
        grad_output=t.put(t.grad),
        output=t.put(y),
        grad_input=grad_input,
        scale=scale,
        factor=scale,
        **by,
    )
    grad = t.grad * t.kept if case.dropout or case.stores else t.grad
    total = (y * grad).sum(1, keepdims=True)
    terms = scale * y * (np.abs(grad) + np.abs(y * grad).sum(1, keepdims=True))
    _near(grad_input.numpy(), case.type, scale * y * (grad - total), terms)


def test_a_row_past_2_32_elements(device):
    """Row 2^28 of 64 keys: its tensors lie so far before their memory that this row is the memory's first; its random
    numbers are its own."""
    if device.emulated:
        pytest.skip("one block of 2^26 cannot be run alone there")
    case = Case("f16x1", 1, 64, queries=4, lanes=3)
    t = Tensors(device, case)
    row, x, output, softmax = 2**28, t.put(t.x), t.empty(), t.empty()
    key = device.put(np.array([SEED], dtype=np.int64))
    arguments = make(
        "SoftmaxForward", HEADER, keys=64, queries=4, heads=HEADS, type=TYPE["f16"], lanes=3, magnitude=1.0,
        factor=1 / math.log(2), seed=key, keep=KEEP, kept_scale=SCALE, kept_by=SCALE, rows=row + 1,
    )  # fmt: skip
    for name, buffer in (("input", x), ("output", output), ("softmax", softmax)):
        setattr(arguments, name, buffer.address - row * case.keys * 2)
    blocks = row // (device.warp_size // 8) + 1
    device.service.only_block(blocks - 1)
    try:
        device.launch("masked_softmax_dropout_forward_f16x1", blocks, device.warp_size, [arguments])
    finally:
        device.service.only_block(-1)
    counter = torch.arange(row * 8, row * 8 + 8, dtype=torch.int64, device="cpu")
    kept = _philox.keep_eight_finely(torch.tensor(SEED, device="cpu"), counter, KEEP).flatten().numpy()
    _near(softmax.numpy(), "f16", t.y, t.y)
    _near(output.numpy(), "f16", t.y * kept * SCALE, t.y * SCALE)
