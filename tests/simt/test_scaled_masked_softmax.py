"""scaled_masked_softmax kernels against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from simt.element_types import DTYPES, ROUNDING, decode, encode
from simt.structs import make

TYPE = {"f32": 0, "f16": 1, "bf16": 2, "f64": 3}
HEADS = 2


@dataclass(frozen=True)
class Case:
    """One shape and the kernel that takes it.

    kernel: the name's end; `masked_` is the forward's alone. lanes: of a row, as a power of two, -1 for a block.
    warps: of a block. queries: more than the rows, so that rows of a long matrix are tested alone. shift: elements by
    which the tensors begin past 16 bytes. waiting: vectors of the next row that a thread of the `held` kernels has on
    their way. strip_rows: of a strip of the `strip` kernels.
    """

    kernel: str
    rows: int
    keys: int
    queries: int = 5
    lanes: int = -1
    causal: bool = False
    masked: bool = False
    warps: int = 2
    grid: int = 2
    scale: float = 0.7
    shift: int = 0
    waiting: int = 0
    strip_rows: int = 0

    def block(self, device) -> int:
        if "few" in self.kernel:
            return 128 if self.lanes <= 5 else 1 << self.lanes
        return 1024 if "held" in self.kernel else self.warps * device.warp_size

    def shared(self, device, tensors: int) -> int:
        """Bytes of dynamic shared memory; `tensors` are read."""
        if self.strip_rows:
            stages = 1 if device.emulated else 2  # AMD has no copies that run beside a wave
            return self.warps * stages * tensors * self.strip_rows * self.keys * DTYPES[self.type].itemsize
        if "held" in self.kernel and not device.emulated:
            return 1024 * 16 * (self.waiting + 8 * (tensors - 1))
        return 0

    @property
    def type(self) -> str:
        for name in ("bf16", "f16", "f32", "f64"):
            if name in self.kernel:
                return name
        return "f16"  # the kernel of any type

    @property
    def backward(self) -> str:
        return self.kernel.replace("masked_", "")

    def __str__(self) -> str:
        flags = "".join(f"-{name}" for name in ("causal", "masked") if getattr(self, name))
        return f"{self.kernel}-{self.rows}x{self.keys}{flags}"


CASES = [
    Case("bf16x1", 11, 24, lanes=2, causal=True, queries=24),  # four lanes a row, the last rows not there
    Case("f16x1", 5, 256, lanes=5, scale=-0.7),
    Case("f16x4", 3, 1000, lanes=5, causal=True, queries=700),
    Case("f32x4", 3, 1000, causal=True, queries=800),
    Case("bf16x8", 5, 1096, lanes=5, causal=True, queries=900),
    Case("f32x8", 3, 520, lanes=5),
    Case("bf16x8w2", 3, 2096, causal=True, queries=1800),
    Case("masked_bf16x1", 13, 64, lanes=3, masked=True),
    Case("masked_f32x4", 3, 260, masked=True, causal=True, queries=200),
    Case("odd_bf16x1", 23, 7, lanes=1, causal=True, queries=9, shift=3),
    Case("odd_f16x4", 4, 601, masked=True),
    Case("odd_f32x1", 5, 33, lanes=4, masked=True, causal=True, queries=30, shift=1),
    Case("long_bf16", 3, 1203, masked=True, causal=True, queries=1000, shift=1),
    Case("long_f32", 2, 516, causal=True, queries=400),
    Case("long_any", 3, 67, shift=1, masked=True),
    Case("long_f64", 4, 67, causal=True, queries=30, masked=True),
    Case("odd_bf16x9", 5, 1151, lanes=5, causal=True, queries=900, shift=3),
    Case("odd_f32x9", 3, 519, lanes=5),
    Case("strip_bf16x9", 21, 101, strip_rows=8, scale=-0.7),  # the last of three ends between two vectors
    Case("strip_f16x19", 43, 197, strip_rows=8),
    Case("strip_f32x9", 30, 33, strip_rows=4, warps=1),
    Case("held_bf16", 3, 8856, causal=True, queries=6000, waiting=1, grid=1),
    Case("held_f32", 3, 4420, waiting=2, grid=1),
    Case(
        "few_bf16", 23, 40, lanes=3, causal=True, queries=46
    ),  # rows that keep nothing; the last are not there
    Case("few_f32", 3, 124, lanes=5, scale=-0.7, grid=1),
    Case("few_f16", 3, 496, lanes=6, causal=True, queries=400, grid=3),
    Case("few_f32", 3, 1000, lanes=8, causal=True, queries=900, grid=3),
    Case("few_masked_bf16", 5, 1000, lanes=7, masked=True, grid=5),
    Case("few_masked_f32", 9, 4, lanes=0, masked=True, causal=True, grid=1),
    Case("few_masked_f16", 7, 128, lanes=4, masked=True, causal=True, queries=60, scale=-0.7, grid=1),
]


def _length(case: Case, row: int) -> int:
    query = row % case.queries
    return max(0, min(case.keys, case.keys - case.queries + query + 1)) if case.causal else case.keys


class Tensors:
    """The case's tensors, and what the kernels must make of them in float64."""

    def __init__(self, device, case: Case):
        self.device, self.case = device, case
        rng = np.random.default_rng(case.keys)
        shape = (case.rows, case.keys)
        self.x = decode(encode(3 * rng.standard_normal(shape), case.type), case.type)
        self.grad = decode(encode(rng.standard_normal(shape), case.type), case.type)
        self.mask = (rng.random((case.queries, case.keys)) < 0.3).astype(np.uint8) * 5
        self.mask[1 % case.queries] = 1
        kept = np.zeros(shape, bool)
        for row in range(case.rows):
            kept[row, : _length(case, row)] = True
            if case.masked:
                kept[row] &= self.mask[row % case.queries] == 0
        with np.errstate(invalid="ignore"):
            z = np.where(kept, case.scale * self.x, -np.inf)
            p = np.exp(z - z.max(1, keepdims=True))
            self.y = np.where(kept.any(1, keepdims=True), p / p.sum(1, keepdims=True), 0)

    def put(self, values, past=False):
        """A tensor; `past`: with nan where nothing may be read, past the diagonal."""
        case = self.case
        values = values.copy()
        if past:
            for row in range(case.rows):
                values[row, _length(case, row) :] = np.nan
        itemsize = DTYPES[case.type].itemsize
        return self.device.put(encode(values, case.type), offset=case.shift * itemsize)

    def empty(self):
        return self.put(np.full((self.case.rows, self.case.keys), 7.0))

    def arguments(self, name, **more):
        c = self.case
        common = dict(rows=c.rows, keys=c.keys, queries=c.queries, type=TYPE[c.type], causal=c.causal)
        if c.masked and name == "SoftmaxForward":
            more |= dict(mask=self.device.put(self.mask), mask_query=c.keys)
        more |= dict(lanes=c.lanes, shift=0 if "any" in c.kernel else c.shift)
        more |= dict(strip_rows=c.strip_rows, waiting=0 if self.device.emulated else c.waiting)
        return make(name, "scaled_masked_softmax.h", **common, **more)

    def launch(self, kernel, arguments):
        block, tensors = self.case.block(self.device), 2 if "backward" in kernel else 1
        shared = self.case.shared(self.device, tensors)
        self.device.launch(f"scaled_masked_softmax_{kernel}", self.case.grid, block, [arguments], shared)


def _near(found, name, expected, terms):
    work = ROUNDING["f64" if name == "f64" else "f32"]
    smallest = 2.0**-25 if name == "f16" else 2.0**-126
    error = np.abs(decode(found, name) - expected)
    assert np.all(error <= 1.01 * ROUNDING[name] * np.abs(expected) + 64 * work * terms + smallest)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(device, case):
    t = Tensors(device, case)
    output = t.empty()
    magnitude = abs(case.scale)
    factor = np.float32(magnitude / math.log(2))
    t.launch(
        f"forward_{case.kernel}",
        t.arguments(
            "SoftmaxForward", input=t.put(t.x, past=True), output=output, heads=HEADS, magnitude=magnitude,
            factor=factor, factor_rest=magnitude / math.log(2) - float(factor), negative=case.scale < 0,
        ),
    )  # fmt: skip
    _near(output.numpy(), case.type, t.y, t.y)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward(device, case):
    if device.emulated and case.kernel == "held_f32":
        pytest.skip("never launched on AMD")
    t = Tensors(device, case)
    y = decode(encode(t.y, case.type), case.type)
    grad_input = t.empty()
    t.launch(
        f"backward_{case.backward}",
        t.arguments(
            "SoftmaxBackward", grad_output=t.put(t.grad, past=True), output=t.put(y, past=True),
            grad_input=grad_input, scale=case.scale, factor=case.scale,
        ),
    )  # fmt: skip
    total = (y * t.grad).sum(1, keepdims=True)
    terms = abs(case.scale) * y * (np.abs(t.grad) + np.abs(y * t.grad).sum(1, keepdims=True))
    _near(grad_input.numpy(), case.type, case.scale * y * (t.grad - total), terms)


def test_a_row_past_2_32_elements(device):
    """Row 2^28 of 64 keys: its tensors lie so far before their memory that this row is the memory's first."""
    if device.emulated:
        pytest.skip("one block of 2^26 cannot be run alone there")
    case = Case("bf16x1", 1, 64, queries=4, lanes=3, causal=True)
    t = Tensors(device, case)
    row, x, output = 2**28, t.put(t.x), t.empty()  # the first row of its block, and query 0
    arguments = t.arguments("SoftmaxForward", heads=HEADS, magnitude=0.7, factor=0.7 / math.log(2))
    arguments.input = x.address - row * case.keys * 2
    arguments.output = output.address - row * case.keys * 2
    arguments.rows = row + 1
    blocks = row // (device.warp_size // 8) + 1
    device.service.only_block(blocks - 1)
    try:
        device.launch("scaled_masked_softmax_forward_bf16x1", blocks, device.warp_size, [arguments])
    finally:
        device.service.only_block(-1)
    _near(output.numpy(), "bf16", t.y, t.y)
