"""Group norm's kernels against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from simt.element_types import DTYPES, ROUNDING, decode, encode
from simt.structs import make
from simt.targets import Target

TYPE = {"f32": 0, "f16": 1, "bf16": 2, "f64": 3}
EPS = 1e-3
FINISH_COLUMNS = 32


def ceil_divide(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Case:
    """One shape and the launches that take it.

    kernel: the names' end. kind: "tile" (one launch), "last" (two, channels last), "first" (two, channels first).
    columns, lanes: of a block, channels last. parts: of a strip, or, channels first, of a group and of a channel.
    warps: of a block. blocks: of the grid, fewer than there is work for, so that it goes around. offset: elements
    past a 16-byte boundary.
    """

    kernel: str
    kind: str
    batch: int
    channels: int
    spatial: int
    groups: int
    columns: int = 0
    lanes: int = 1
    parts: int = 1
    team: int = 4
    warps: int = 2
    blocks: int = 2
    silu: bool = True
    dtype: str = "bf16"
    weight: str | None = "f32"
    offset: int = 0

    @property
    def math(self) -> str:
        return "f64" if self.dtype == "f64" else "f32"

    @property
    def width(self) -> int:
        return {"f32": 4, "f16": 8, "bf16": 8}.get(self.kernel, 1)

    @property
    def strips(self) -> int:
        return ceil_divide(self.channels, self.columns * self.width)

    @property
    def slots(self) -> int:
        """Of a group of an image."""
        group, strip = self.channels // self.groups, self.columns * self.width
        if self.kind == "first" or strip % group == 0:
            return self.parts
        return self.parts * ((group - 1) // strip + 2)

    def __str__(self) -> str:
        shape = f"{self.batch}x{self.channels}x{self.spatial}g{self.groups}"
        return f"{self.kind}-{self.kernel}-{shape}" + "-silu" * self.silu


CASES = [
    Case("bf16", "tile", 2, 40, 13, 4, columns=5, lanes=12, warps=4),
    Case("bf16", "tile", 2, 64, 7, 1, columns=8, lanes=6, warps=4),  # one helper a sum, or two
    Case("bf16", "tile", 2, 72, 9, 3, columns=6, lanes=20, warps=4, blocks=3, weight=None, silu=False),
    Case("f32", "tile", 3, 24, 7, 3, columns=4, lanes=9, dtype="f32", silu=False, weight="bf16"),
    Case("f16", "tile", 1, 96, 21, 6, columns=4, lanes=14, dtype="f16", weight="f16", blocks=5),
    Case("bf16", "last", 2, 40, 29, 4, columns=5, lanes=6, parts=3, weight="bf16"),
    Case("f32", "last", 1, 160, 9, 2, columns=7, lanes=9, parts=2, dtype="f32"),
    Case("any1", "last", 2, 15, 11, 3, columns=10, lanes=6, parts=2, offset=1),
    Case("f64", "last", 2, 6, 9, 2, columns=3, lanes=8, dtype="f64", weight="f64"),
    Case("bf16", "first", 2, 6, 56, 3, parts=2, team=4),
    Case("f32", "first", 3, 4, 12, 2, parts=1, team=2, dtype="f32", silu=False, weight=None),
    Case("any1", "first", 1, 6, 13, 2, parts=3, team=8, dtype="f16", weight="f16", offset=1),
    Case("f64", "first", 2, 4, 10, 2, parts=2, team=16, dtype="f64", weight="f64"),
]


class Problem:
    """The tensors of a case."""

    def __init__(self, device, case: Case):
        self.device, self.case = device, case
        rng = np.random.default_rng(case.channels)
        shape = (case.batch, case.channels, case.spatial)
        self.x = decode(encode(3 + rng.standard_normal(shape), case.dtype), case.dtype)
        self.dy = decode(encode(rng.standard_normal(shape), case.dtype), case.dtype)
        self.weight, self.bias = np.ones(case.channels), np.zeros(case.channels)
        if case.weight:
            self.weight = decode(encode(0.5 + rng.random(case.channels), case.weight), case.weight)
            self.bias = decode(encode(rng.standard_normal(case.channels), case.weight), case.weight)

    def oracle(self):
        """(output, mean, rstd, gradient of the input, of the weight, of the bias)"""
        c = self.case
        x = self.x.reshape(c.batch, c.groups, -1)
        mean, rstd = x.mean(2), 1 / np.sqrt(x.var(2) + EPS)
        normalized = ((x - mean[..., None]) * rstd[..., None]).reshape(self.x.shape)
        w = self.weight[:, None]
        z = normalized * w + self.bias[:, None]
        s = 1 / (1 + np.exp(-z))
        g = self.dy * (s * (1 + z * (1 - s)) if c.silu else 1)
        gw, n = (g * w).reshape(x.shape), normalized.reshape(x.shape)
        dx = (gw - gw.mean(2, keepdims=True) - n * (gw * n).mean(2, keepdims=True)) * rstd[..., None]
        y = z * s if c.silu else z
        return y, mean, rstd, dx.reshape(self.x.shape), (g * normalized).sum((0, 2)), g.sum((0, 2))

    def put(self, values, dtype, image=False):
        """On the device; `image`: in the case's layout, at its offset."""
        if image and self.case.kind != "first":
            values = values.swapaxes(1, 2)
        encoded = encode(values, dtype)
        return self.device.put(encoded, self.case.offset * encoded.itemsize if image else 0)

    def empty(self, shape, dtype, image=False):
        return self.put(np.full(shape, 7.0), dtype, image)

    def image(self, buffer):
        """What the device holds, as float64 [batch, channels, spatial]."""
        c = self.case
        values = decode(buffer.numpy(), c.dtype).reshape(c.batch, -1)
        if c.kind == "first":
            return values.reshape(self.x.shape)
        return values.reshape(c.batch, c.spatial, c.channels).swapaxes(1, 2)

    def arguments(self, **more):
        c = self.case
        # Channels first, a part of a channel is counted in vectors.
        rows = c.spatial // c.width if c.kind == "first" else c.spatial
        weights = {}
        if c.weight:
            weights = dict(weight=self.put(self.weight, c.weight), bias=self.put(self.bias, c.weight))
        geometry = dict(columns=c.columns, lanes=c.lanes, strips=c.strips if c.columns else 0, parts=c.parts)
        geometry |= dict(
            part_size=ceil_divide(rows, c.parts), slots=c.slots, team=c.team, apply_blocks=c.blocks
        )
        return make(
            "GroupNorm", "group_norm_arguments.h", input=self.put(self.x, c.dtype, True), batch=c.batch,
            channels=c.channels, spatial=c.spatial, groups=c.groups, eps=EPS, input_type=TYPE[c.dtype],
            weight_type=TYPE[c.weight or "f32"], channels_last=c.kind != "first", silu=c.silu,
            group_partials=self.empty((c.batch, c.groups, c.slots, 2), c.math), **geometry, **weights, **more,
        )  # fmt: skip

    @property
    def block(self):
        return self.case.warps * self.device.warp_size

    @property
    def shared(self):
        """Bytes: 2 * width + 3 numbers for each thread, some for each column, then two tensors' rows."""
        c = self.case
        if c.kind == "first":
            return 0
        rows = ceil_divide(c.spatial, c.lanes) * 2 if c.kind == "tile" else 0
        of_columns = 3 * 2 * c.width * c.columns if c.kind == "tile" else 0
        return self.block * ((2 * c.width + 3) * DTYPES[c.math].itemsize + rows * 16) + of_columns * 4

    def near(self, found, expected, dtype):
        work, scale = ROUNDING[self.case.math], max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(
            found, expected, rtol=1.01 * ROUNDING[dtype] + 8 * work, atol=96 * scale * work
        )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(device, case):
    p = Problem(device, case)
    y, mean, rstd, *_ = p.oracle()
    output = p.empty(p.x.shape, case.dtype, True)
    statistics = [p.empty(mean.shape, case.math) for _ in range(2)]
    arguments = p.arguments(output=output, mean=statistics[0], rstd=statistics[1])
    if case.kind == "tile":
        launches = [f"forward_tile_{case.kernel}"]
    else:
        launches = [f"{part}_{case.kind}_{case.kernel}" for part in ("statistics", "apply")]
    for kernel in launches:
        device.launch(f"group_norm_{kernel}", case.blocks, p.block, [arguments], shared=p.shared)
    p.near(p.image(output), y, case.dtype)
    p.near(statistics[0].numpy(), mean, case.math)
    p.near(statistics[1].numpy(), rstd, case.math)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward(device, case):
    p = Problem(device, case)
    _, mean, rstd, dx, dw, db = p.oracle()
    output = p.empty(p.x.shape, case.dtype, True)
    found = [p.empty(case.channels, case.weight or "f32") for _ in range(2)]
    # Of halves, the strip's last block adds the weights' gradients up.
    counters = (
        {"counters": device.full(case.strips, 0, np.uint32)}
        if case.kind == "tile" and case.width == 8
        else {}
    )
    arguments = p.arguments(
        **counters, grad_output=p.put(p.dy, case.dtype, True), output=output, mean=p.put(mean, case.math),
        rstd=p.put(rstd, case.math), grad_weight=found[0], grad_bias=found[1],
        channel_partials=p.empty((case.batch, case.parts, 2, case.channels), case.math),
    )  # fmt: skip
    finish = ceil_divide(case.channels, FINISH_COLUMNS)
    if case.kind == "tile":
        launches = {f"backward_tile_{case.kernel}": case.blocks}
        if not counters:
            launches["finish"] = finish
    else:
        names = [f"{part}_{case.kind}_{case.kernel}" for part in ("sums", "gradient")]
        launches = {names[0]: case.blocks, names[1]: case.blocks + finish}
    for kernel, blocks in launches.items():
        device.launch(f"group_norm_{kernel}", blocks, p.block, [arguments], shared=p.shared)
    p.near(p.image(output), dx, case.dtype)
    for buffer, expected in zip(found, (dw, db), strict=True):
        p.near(decode(buffer.numpy(), case.weight or "f32"), expected, case.weight or "f32")


# ---- offsets past 32 bits -----------------------------------------------------------------------------------

ROWS, CHANNELS = 70_001, 32_776  # 2,294,352,776 elements of one image, channels last


@pytest.mark.parametrize("width", [32, 64])
def test_last_rows_past_two_to_the_31(width):
    """Memory that costs nothing until touched; the last part's last strip alone runs."""
    device = Target(f"plain-{width}", "plain", width, 0).device()
    service, lanes, group = device.service, 4, 8
    part_size = 2 * lanes  # twice the rows that a block takes at once: the grid stays below 2^32 threads
    parts, strips = ceil_divide(ROWS, part_size), CHANNELS // 8
    first_row = (parts - 1) * part_size
    rng = np.random.default_rng(4)
    values = encode(3 + rng.standard_normal((ROWS - first_row, group)), "bf16")
    input, output = (service.allocate(ROWS * CHANNELS * 2, 0) for _ in range(2))
    slots = service.allocate(strips * parts * 2 * 4, 0)

    def at(row):
        return (row * CHANNELS + CHANNELS - group) * 2

    for row, of_row in enumerate(values, first_row):
        service.write(input + at(row), of_row.tobytes())
    service.write(input + at(0), values[0].tobytes())  # where the group's differences are taken from
    arguments = make(
        "GroupNorm", "group_norm_arguments.h", input=input, output=output, batch=1, channels=CHANNELS, spatial=ROWS,
        groups=strips, eps=EPS, input_type=TYPE["bf16"], weight_type=0, channels_last=1, columns=1, lanes=lanes,
        strips=strips, parts=parts, part_size=part_size, slots=parts, apply_blocks=parts * strips, group_partials=slots,
        mean=device.full(1, 0), rstd=device.full(1, 0),
    )  # fmt: skip
    service.only_block(parts * strips - 1)
    try:
        device.launch("group_norm_statistics_last_bf16", parts * strips, 64, [arguments], shared=64 * 19 * 4)
    finally:
        service.only_block(-1)
    last = slots + ((strips - 1) * parts + parts - 1) * 8
    mean, m2 = np.frombuffer(service.read(last, 8), np.float32)
    x = decode(values, "bf16")
    np.testing.assert_allclose(mean, (x - x[0, 0]).mean(), rtol=1e-5)
    np.testing.assert_allclose(m2, x.var() * x.size, rtol=1e-5)
    for address in (input, output, slots):
        service.free(address)
    device.close()
