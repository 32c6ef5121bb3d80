"""Launches of batch norm's kernels and what they must give: what the tests of its ops share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simt.element_types import DTYPES, ROUNDING, decode, encode
from simt.structs import make

TYPE = {"f32": 0, "f16": 1, "bf16": 2, "f64": 3}


def ceil_divide(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Case:
    """One tensor [batch, channels, spatial] and how its kernels are launched.

    kind: which kernel. parts: of a reduction, or of a pass in memory's order. offset: bytes past a multiple of 16 at
    which tensors begin.
    """

    kind: str
    dtype: str
    batch: int
    channels: int
    spatial: int = 1
    threads: int = 64
    parts: int = 1
    offset: int = 0
    weight: str = ""
    z: bool = False
    relu: bool = False
    mask: bool = False

    def __str__(self) -> str:
        shape = "x".join(map(str, (self.batch, self.channels, self.spatial)))
        flags = [name for name in ("z", "relu", "mask") if getattr(self, name)]
        return "-".join([self.kind, self.dtype, shape, *flags, *(["offset"] if self.offset else [])])

    @property
    def math(self) -> str:
        return "f64" if self.dtype == "f64" else "f32"

    @property
    def width(self) -> int:
        """Elements that a thread takes at once."""
        return 1 if self.kind.endswith("last1") else 16 // DTYPES[self.dtype].itemsize

    @property
    def pass_width(self) -> int:
        """Likewise, in an elementwise pass: whole bytes of a mask."""
        return 8 if self.mask else self.width

    @property
    def columns(self) -> int:
        """Vectors side by side in a block, channels last."""
        wide = ceil_divide(self.channels, self.width)
        return 1 << (min(wide, 64 if self.width == 1 else 8) - 1).bit_length()


REDUCTIONS = [
    Case("first", "f16", 3, 2, 24),
    Case("first", "f16", 5, 3, 13, parts=2, offset=2),
    Case("first", "bf16", 4, 2, 200, threads=128, parts=3),
    Case("first", "f32", 3, 2, 37, parts=2, offset=4),
    Case("first", "f64", 2, 2, 9),
    Case("first", "f16", 30, 1, 192),
    Case("first", "bf16", 40, 2, 49, threads=192, parts=2),
    Case("first", "bf16", 30, 3, 77, offset=2),
    Case("last", "f16", 70, 16, threads=128, parts=2),
    Case("last", "bf16", 600, 16, parts=2),
    Case("last", "bf16", 9, 136),
    Case("last", "f32", 40, 12, parts=3),
    Case("last", "f64", 20, 6, parts=2),
    Case("last", "f16", 100, 64, parts=12),  # 1.5 parts a lane
    Case("last", "f32", 60, 32, parts=12),
    Case("last1", "f16", 30, 5, parts=2, offset=2),
    Case("last1", "f32", 40, 70, parts=4),
    Case("last1", "f16", 70, 2, threads=256, offset=2),  # more groups of lanes than channels
]
PASSES = [
    Case("any", "f16", 3, 2, 24, weight="f32", z=True, relu=True),
    Case("any", "f16", 30, 7, 40, parts=3),
    Case("any", "bf16", 5, 3, 13, weight="bf16", parts=2),
    Case("any", "bf16", 40, 6, 49, weight="f32", parts=2, z=True),
    Case("any", "f32", 3, 5, 1, weight="f16", relu=True, offset=4),
    Case("any", "f32", 2, 300, 3, parts=2),
    Case("any", "f64", 2, 2, 9, weight="f64", z=True),
    Case("last", "f16", 200, 16, weight="f16"),
    Case("last", "f16", 21, 24, weight="f16", z=True),
    Case("last", "bf16", 3, 520, weight="f32", relu=True),  # three blocks side by side
    Case("last", "f32", 9, 12, z=True, relu=True),
    Case("last", "f64", 20, 6),
]


MASKED_REDUCTIONS = [
    Case("masked_last", "f16", 70, 16, threads=128, parts=2),
    Case("masked_last", "bf16", 9, 136),
    Case("masked_last", "f32", 40, 12, parts=3),
    Case("masked_last", "f64", 20, 6, parts=2),
    Case("masked_last1", "f16", 30, 5, parts=2, offset=2),
    Case("masked_last1", "f32", 7, 70),
]
MASKED_PASSES = [
    Case("last", "f16", 21, 24, weight="f32", z=True, relu=True, mask=True),
    Case("last", "bf16", 3, 520, relu=True, mask=True),
    Case("last", "f32", 9, 16, weight="f32", z=True, relu=True, mask=True),
    Case("last", "f64", 20, 8, relu=True, mask=True),
    Case("any", "f16", 21, 5, weight="f16", z=True, relu=True, mask=True, parts=3),
    Case("any", "bf16", 9, 16, relu=True, offset=2, mask=True),
    Case("any", "f32", 400, 12, weight="f32", relu=True, mask=True, parts=3),
    Case("any", "f64", 5, 3, z=True, relu=True, mask=True),
]


class Tensors:
    """The case's tensors on a device, and in float64 exactly as their dtypes hold them."""

    def __init__(self, device, case: Case, mean: float = 3.0):
        self.device, self.case = device, case
        rng = np.random.default_rng(case.batch * 1000 + case.channels)
        shape = (case.batch, case.channels, case.spatial)

        def rounded(x, name):
            return decode(encode(x, name), name)

        self.x = rounded(rng.standard_normal(shape) * 2 + mean, case.dtype)
        self.dy, self.z = (rounded(rng.standard_normal(shape), case.dtype) for _ in range(2))
        weight = case.weight or case.math
        self.weight, self.shift = np.ones(case.channels), np.zeros(case.channels)
        if case.weight:
            self.weight = rounded(rng.uniform(0.5, 1.5, case.channels), weight)
            self.shift = rounded(rng.standard_normal(case.channels), weight)
        self.mean = rounded(self.x.mean((0, 2)), case.math)
        self.inv_std = rounded(1 / np.sqrt(self.x.var((0, 2)) + 1e-3), case.math)

    def spread(self, x: np.ndarray) -> np.ndarray:
        """[channels] against the tensors."""
        return x[:, None]

    def put(self, name: str, dtype: str, offset: int = 0):
        return self.device.put(encode(getattr(self, name), dtype), offset)

    def empty(self, shape, dtype: str, offset: int = 0):
        return self.device.put(np.full(shape, encode(np.array(7.0), dtype)[()], DTYPES[dtype]), offset)

    def statistics(self) -> dict:
        return {name: self.put(name, self.case.math) for name in ("mean", "inv_std")}

    def common(self) -> dict:
        c = self.case
        last = c.kind != "first" and c.kind != "any" or c.mask
        return dict(
            batch=c.batch, channels=c.channels, spatial=c.spatial, input_type=TYPE[c.dtype],
            weight_type=TYPE[c.weight or c.math], channels_last=last,
        )  # fmt: skip


def near(found, dtype: str, expected: np.ndarray, arithmetic: float = 32.0) -> None:
    """Within one rounding to the dtype and some of the arithmetic, relative to the largest value."""
    work = ROUNDING["f64" if dtype == "f64" else "f32"]
    np.testing.assert_allclose(
        decode(found, dtype).reshape(expected.shape),
        expected,
        rtol=1.01 * ROUNDING[dtype] + 8 * work,
        atol=arithmetic * work * np.abs(expected).max(initial=1.0),
    )


def reduce(t: Tensors, op: str, same_alignment=True, **more):
    """Launches a reduction twice, which must leave its counters zero; its sums, one number more than most ops write.

    Each launch finds partial results and sums that are nan: whoever reads one before it is written shows.
    """
    c, device = t.case, t.device
    values = {"input": t.put("x", c.dtype, c.offset), **more}
    geometry = {"threads": c.threads, "width": c.width}
    if c.kind == "first":
        exact = c.spatial % c.width == 0 and not c.offset
        segment = c.spatial // c.width if exact else ceil_divide(c.spatial + c.width - 1, c.width)
        of_part = ceil_divide(c.batch * segment, c.parts)
        parts, blocks = ceil_divide(c.batch * segment, of_part), c.channels
        pitch, vector = c.channels * c.spatial * DTYPES[c.dtype].itemsize, 16 if exact else 0
        geometry |= dict(
            segment_vectors=segment, part_vectors=of_part, step_vectors=c.threads % segment,
            step_bytes=c.threads // segment * pitch + c.threads % segment * vector,
            wrap_bytes=pitch - segment * vector, exact=exact, same_alignment=same_alignment,
        )  # fmt: skip
    else:
        blocks = ceil_divide(ceil_divide(c.channels, c.width), c.columns)
        rows = ceil_divide(c.batch, c.parts)
        parts = ceil_divide(c.batch, rows)
        geometry |= dict(
            columns=c.columns, column_blocks=blocks, part_rows=rows,
            step_bytes=c.threads // c.columns * c.channels * DTYPES[c.dtype].itemsize,
        )  # fmt: skip
    counters = device.put(np.zeros(blocks, np.uint32))
    shapes = (parts, 3, c.channels), 2 * c.channels + 1
    unwritten = [np.full(shape, np.nan, DTYPES[c.math]) for shape in shapes]
    partials, sums = (device.put(array) for array in unwritten)
    arguments = make(
        "ChannelReduce", "batchnorm_arguments.h", sums=sums, partials=partials, counters=counters, parts=parts,
        **values, **t.common(), **geometry,
    )  # fmt: skip
    for _ in range(2):
        partials.fill_from(unwritten[0])
        sums.fill_from(unwritten[1])
        device.launch(f"{op}_{c.kind}_{c.dtype}", parts * blocks, c.threads, [arguments])
        np.testing.assert_array_equal(counters.numpy(), 0)
    return decode(sums.numpy(), c.math)


def apply(t: Tensors, op: str, **more):
    """Launches an elementwise pass; its output."""
    c, device = t.case, t.device
    output = t.empty(t.x.shape, c.dtype, c.offset)
    grid = 2
    geometry = {"relu": c.relu, "vectors": not c.offset}
    if c.kind == "last":
        wide = c.channels // c.pass_width
        columns = 1 << (min(wide, 32) - 1).bit_length()
        blocks = ceil_divide(wide, columns)
        rows = ceil_divide(c.batch, grid)
        grid = ceil_divide(c.batch, rows) * blocks
        geometry |= dict(columns=columns, column_blocks=blocks, part_rows=rows)
    else:
        step, vectors = c.threads * c.pass_width, ceil_divide(t.x.size, c.pass_width)
        part = ceil_divide(vectors, c.parts)
        grid = ceil_divide(vectors, part)
        geometry |= dict(
            part_vectors=part, step_spatial=step % c.spatial, step_channels=step // c.spatial % c.channels
        )
    if c.weight:
        more |= {name: t.put(name, c.weight) for name in ("weight", "shift")}
    if c.z:
        more["z"] = t.put("z", c.dtype, c.offset)
    arguments = make(
        "ChannelApply", "batchnorm_arguments.h", input=t.put("x", c.dtype, c.offset), output=output,
        **(t.statistics() | more), **t.common(), **geometry,
    )  # fmt: skip
    device.launch(f"{op}_{c.kind}_{c.dtype}", grid, c.threads, [arguments])
    return output.numpy()


def normalized(t: Tensors) -> np.ndarray:
    """The forward before its ReLU."""
    y = (t.x - t.spread(t.mean)) * t.spread(t.inv_std * t.weight) + t.spread(t.shift)
    return y + t.z if t.case.z else y


def bits(flags: np.ndarray) -> np.ndarray:
    """A mask of [batch, channels, 1] in the order of its elements."""
    return np.packbits(flags.ravel(), bitorder="little")


def some_bits(t: Tensors) -> np.ndarray:
    """Which elements a mask shall leave: about half of them."""
    return np.random.default_rng(7).random(t.x.shape) < 0.5
