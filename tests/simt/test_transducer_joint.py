"""The transducer joint's kernels against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from simt.element_types import DTYPES, ROUNDING, decode, encode
from simt.structs import make
from simt.targets import Target

TYPE = {"f32": 0, "f16": 1, "bf16": 2, "f64": 3}
HEADER = "transducer_joint_arguments.h"
SCALE = 1.25


@dataclass(frozen=True)
class Case:
    """One shape and the launch that takes it.

    elements: rows that no vector fits. held: the kernels of CUDA where a block has all labels. apart: those of little
    work, where a warp has a row of a gradient.
    splits, tile: blocks that share an item's frames, and frames of each.
    blocks: of the grid, fewer than there is work for, so that it goes around.
    """

    dtype: str
    frames: int
    labels: int
    hidden: int
    mask: str = "relu"
    packed: bool = False
    elements: bool = False
    held: bool = False
    apart: bool = False
    shifted: bool = False
    splits: int = 1
    tile: int = 0
    blocks: int = 2
    wide: bool = False

    @property
    def math(self) -> str:
        return "f64" if self.dtype == "f64" else "f32"

    @property
    def kernel(self) -> str:
        return f"elements_{self.math}" if self.elements else "shifted_" * self.shifted + self.dtype

    def __str__(self) -> str:
        ways = ("packed", "held", "apart", "shifted")
        shape = f"{self.dtype}-{self.frames}x{self.labels}x{self.hidden}-{self.mask}"
        return shape + "".join(f"-{way}" for way in ways if getattr(self, way))


CASES = [
    Case("bf16", 5, 35, 24, splits=2, tile=3),
    Case("f16", 3, 4, 72, "none", packed=True, wide=True),
    Case("f32", 4, 3, 16, "bits", packed=True, splits=4, tile=1, blocks=3),
    Case("bf16", 3, 33, 13, "bits", elements=True, splits=3, tile=1),
    Case("f16", 2, 3, 67, elements=True, packed=True, wide=True),
    # Rows begin at every place between two vectors; more vectors than a warp's threads have at once.
    Case("bf16", 4, 35, 67, shifted=True, splits=2, tile=2, blocks=3),
    Case("f16", 5, 7, 81, "none", shifted=True, packed=True, wide=True),
    Case("bf16", 2, 9, 525, shifted=True, packed=True),
    Case("f64", 3, 5, 8, "relu", splits=1),
    Case("f64", 2, 2, 16, "bits", packed=True),
]
# Labels of one warp; of several, with warps left over; of all but one, a frame at a time. More frames than lie between
# two barriers, and fewer.
HELD = [
    Case("bf16", 93, 16, 72, held=True, blocks=4),
    Case("f16", 26, 35, 72, "none", held=True, packed=True, wide=True),
    Case("bf16", 5, 303, 8, held=True, packed=True),
    Case("f16", 9, 35, 8, held=True, splits=3, tile=4),
    Case("bf16", 3, 2, 64, held=True),
    Case("bf16", 27, 17, 72, "bits", held=True, packed=True),
    Case("f16", 9, 35, 8, "bits", held=True, splits=3, tile=4),
]
HELD_THREADS, HELD_SLAB, HELD_BYTES = 640, 64, {"none": 128, "relu": 224, "bits": 128}  # bytes a thread
APART_THREADS = 64  # a block of these kernels has no more; one of others has two warps here
# Sums of more rows than a warp has on their way, and of fewer; one row and column more than it takes.
APART = [
    Case("bf16", 37, 9, 72, apart=True, wide=True),
    Case("f16", 3, 35, 8, "bits", apart=True, packed=True),
    Case("f32", 20, 3, 36, "none", apart=True, packed=True),
    Case("f64", 2, 9, 18, apart=True, blocks=5),
    Case("f64", 3, 5, 8, "bits", apart=True),
    Case("bf16", 19, 6, 13, apart=True, elements=True),
    Case("f16", 3, 5, 9, "bits", apart=True, elements=True, packed=True),
]


class Problem:
    """Three items: the second has fewer frames and labels, the third none."""

    def __init__(self, device, case: Case):
        self.device, self.case = device, case
        rng = np.random.default_rng(case.hidden)
        self.f = self.values(rng, (3, case.frames, case.hidden))
        self.g = self.values(rng, (3, case.labels, case.hidden))
        self.f_len = np.array([case.frames, max(case.frames - 1, 1), 0])
        self.g_len = np.array([case.labels, case.labels - 1, case.labels])
        self.offset = np.cumsum(self.f_len * self.g_len)
        self.inside = (np.arange(case.frames) < self.f_len[:, None])[:, :, None] & (
            np.arange(case.labels) < self.g_len[:, None]
        )[:, None]
        self.rows = int(self.offset[-1]) + 2 if case.packed else self.inside.size
        self.grad = self.values(rng, (self.rows, case.hidden))
        self.bits = rng.integers(0, 256, (self.rows, -(-case.hidden // 8))).astype(np.uint8)

    def values(self, rng, shape):
        return decode(encode(rng.standard_normal(shape), self.case.dtype), self.case.dtype)

    def unpack(self, rows):
        """[batch, frames, labels, columns] of rows; zeros where no item is, if they are packed."""
        whole = np.zeros((*self.inside.shape, rows.shape[-1]), rows.dtype)
        if not self.case.packed:
            return rows.reshape(whole.shape)
        whole[self.inside] = rows[: self.inside.sum()]
        return whole

    def put(self, values):
        return self.device.put(encode(values, self.case.dtype))

    def empty(self, shape, dtype=None):
        dtype = dtype or self.case.dtype
        return self.device.put(np.full(shape, encode(np.array(7.0), dtype)[()], DTYPES[dtype]))

    def common(self):
        c = self.case
        kind = np.int64 if c.wide else np.int32
        return dict(
            f_len=self.device.put(self.f_len.astype(kind)), g_len=self.device.put(self.g_len.astype(kind)),
            batch_offset=self.device.put(self.offset.astype(np.int64)) if c.packed else None,
            batch=3, frames=c.frames, labels=c.labels, hidden=c.hidden, rows=self.rows, scale=SCALE,
            type=TYPE[c.dtype], wide_lengths=c.wide,
        )  # fmt: skip

    def near(self, found, wanted, size=0.0):
        work = ROUNDING[self.case.math]
        error = np.abs(decode(found, self.case.dtype) - wanted)
        assert (error <= 1.01 * ROUNDING[self.case.dtype] * np.abs(wanted) + 16 * work * (size + 1)).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(device, case):
    p = Problem(device, case)
    dropout = case.mask == "bits"
    output, mask = p.empty((p.rows, case.hidden)), device.put(np.full(p.bits.shape, 0xAA, np.uint8))
    arguments = make(
        "TransducerJointForward", HEADER, f=p.put(p.f), g=p.put(p.g), output=output, mask=mask, keep=30000,
        seed=device.put(np.array([12345], np.int64)) if dropout else None,
        relu=case.mask == "relu", lanes=8, tile_frames=2, **p.common(),
    )  # fmt: skip
    kernel = f"staged_{case.dtype}" if case.shifted else case.kernel
    name = f"transducer_joint_{'dropout' if dropout else 'forward'}_{kernel}"
    device.launch(name, case.blocks, 256 if case.shifted else 128, [arguments])
    total = p.f[:, :, None] + p.g[:, None]
    found = p.unpack(decode(output.numpy(), case.dtype))
    if dropout:
        kept = np.unpackbits(p.unpack(mask.numpy()), axis=-1, bitorder="little")[..., : case.hidden].astype(
            bool
        )
        assert not kept[~p.inside].any() and 0.3 < kept[p.inside].mean() < 0.6
        total = np.where(kept, SCALE * total, 0)
    elif case.mask == "relu":
        total = np.maximum(total, 0)
    p.near(encode(found[p.inside], case.dtype), total[p.inside])
    rest = decode(output.numpy(), case.dtype)[p.offset[-1] :] if case.packed else found[~p.inside]
    np.testing.assert_array_equal(rest, -1)


@pytest.mark.parametrize("case", CASES + HELD + APART, ids=str)
def test_backward(device, case):
    if case.held and device.emulated:
        pytest.skip("CUDA alone has these kernels")
    p = Problem(device, case)
    of_f, of_g = p.empty(p.f.shape), p.empty(p.g.shape)
    vectors = HELD_SLAB if case.held else 128 // np.dtype(DTYPES[case.dtype]).itemsize
    slab = device.warp_size if case.elements else vectors
    counters = device.put(np.zeros(3 * -(-case.hidden // slab), np.uint32))
    arguments = make(
        "TransducerJointBackward", HEADER, grad_output=p.put(p.grad), grad_f=of_f, grad_g=of_g,
        f=p.put(p.f) if case.mask == "relu" else None, g=p.put(p.g) if case.mask == "relu" else None,
        mask=device.put(p.bits), counters=counters, splits=case.splits, tile_frames=case.tile or case.frames,
        partials=p.empty((case.splits, *p.g.shape), case.math), **p.common(),
    )  # fmt: skip
    math_bytes = 8 if case.math == "f64" else 4
    shared = (
        slab * math_bytes * (case.tile or case.frames)
        if case.labels > (16 if case.elements or case.shifted else 32)
        else 0
    )
    way = "held_" * case.held + "apart_" * case.apart
    name = f"transducer_joint_backward_{case.mask}_{way}{case.kernel}"
    threads = HELD_THREADS if case.held else APART_THREADS if case.apart else 2 * device.warp_size
    if case.held:
        shared = HELD_BYTES[case.mask] * threads
    device.launch(name, case.blocks, threads, [arguments], shared)
    passes = p.inside[..., None]
    if case.mask == "relu":
        passes = passes & (p.f[:, :, None] + p.g[:, None] > 0)
    elif case.mask == "bits":
        bits = np.unpackbits(p.unpack(p.bits), axis=-1, bitorder="little")[..., : case.hidden]
        passes = passes & bits.astype(bool)
    grad = np.where(passes, SCALE * p.unpack(p.grad), 0)
    p.near(of_f.numpy(), grad.sum(2), np.abs(grad).sum(2))
    p.near(of_g.numpy(), grad.sum(1), np.abs(grad).sum(1))
    assert not counters.numpy().any()


def test_items_that_do_not_fit(device):
    """They are nan, their gradients too, and nothing outside is touched."""
    for packed, f_len, g_len, offset in (
        (False, [5, 2, -1], [2, 3, 2], None),
        (True, [4, 2, 2], [2, 4, 2], [8, 16, 20]),
        (True, [1, 2, 2], [2, 2, 2], [2, 5, 99]),
    ):
        p = Problem(device, Case("f32", 4, 3, 8, packed=packed))
        bad = [True, False, True] if not packed else [False, True, offset[2] > p.rows]
        p.f_len, p.g_len = np.array(f_len), np.array(g_len)
        p.offset = np.array(offset or [0, 0, 0])
        output, of_f, of_g = p.empty((p.rows, 8)), p.empty(p.f.shape), p.empty(p.g.shape)
        inputs = dict(f=p.put(p.f), g=p.put(p.g), **p.common())
        forward = make("TransducerJointForward", HEADER, output=output, lanes=8, tile_frames=2, **inputs)
        device.launch("transducer_joint_forward_f32", 2, 64, [forward])
        backward = make(
            "TransducerJointBackward", HEADER, grad_output=p.put(p.grad), grad_f=of_f, grad_g=of_g, splits=1,
            tile_frames=4, **inputs,
        )  # fmt: skip
        for kernel in ("relu_f32", "relu_apart_f32"):
            device.launch(f"transducer_joint_backward_{kernel}", 2, 64, [backward])
            for gradient in (of_f, of_g):
                np.testing.assert_array_equal(np.isnan(gradient.numpy()).all((1, 2)), bad)
                np.testing.assert_array_equal(np.isnan(gradient.numpy()).any((1, 2)), bad)
                gradient.fill_from(np.full(gradient.shape, 7.0, np.float32))
        assert np.isnan(output.numpy()).any()
        if not packed:
            items = output.numpy().reshape(3, -1)
            np.testing.assert_array_equal(np.isnan(items).all(1), bad)
            np.testing.assert_array_equal(np.isnan(items).any(1), bad)


def test_items_that_do_not_fit_where_rows_begin_anywhere(device):
    """The forward through shared memory: their rows are nan, those of the others and of no item are not."""
    for packed, f_len, g_len, offset in (
        (False, [5, 2, -1], [2, 3, 2], [0, 0, 0]),
        (True, [4, 2, 2], [2, 4, 2], [8, 16, 20]),
    ):
        p = Problem(device, Case("bf16", 4, 3, 67, packed=packed, shifted=True))
        p.f_len, p.g_len, p.offset = np.array(f_len), np.array(g_len), np.array(offset)
        output = p.empty((p.rows, 67))
        arguments = make(
            "TransducerJointForward",
            HEADER,
            f=p.put(p.f),
            g=p.put(p.g),
            output=output,
            tile_frames=2,
            **p.common(),
        )
        device.launch("transducer_joint_forward_staged_bf16", 2, 256, [arguments])
        bad = np.repeat([False, True, False], [8, 8, 4]) if packed else np.repeat([True, False, True], 12)
        found = np.isnan(decode(output.numpy(), "bf16"))
        np.testing.assert_array_equal(found.all(1), bad)
        np.testing.assert_array_equal(found.any(1), bad)


# ---- offsets past 32 bits -----------------------------------------------------------------------------------

FRAMES, LABELS, HIDDEN = 4099, 515, 1024  # 2,161,648,640 elements of one item


@pytest.mark.parametrize("width", [32, 64])
def test_last_rows_past_two_to_the_31(width):
    """Memory that costs nothing until touched; the block of the last frames and labels alone runs."""
    device = Target(f"plain-{width}", "plain", width, 0).device()
    service, rng = device.service, np.random.default_rng(4)
    output = service.allocate(FRAMES * LABELS * HIDDEN * 2, 0)
    f, g = (
        encode(rng.standard_normal((FRAMES, HIDDEN)), "bf16"),
        encode(rng.standard_normal((LABELS, HIDDEN)), "bf16"),
    )
    arguments = make(
        "TransducerJointForward", HEADER, f=device.put(f), g=device.put(g), output=output, lanes=64,
        tile_frames=2, f_len=device.put(np.array([FRAMES], np.int32)), g_len=device.put(np.array([LABELS], np.int32)),
        batch=1, frames=FRAMES, labels=LABELS, hidden=HIDDEN, rows=FRAMES * LABELS, type=TYPE["bf16"],
    )  # fmt: skip
    blocks = -(-FRAMES // 8) * -(-LABELS // 6)
    service.only_block(blocks - 1)
    try:
        device.launch("transducer_joint_forward_bf16", blocks, 256, [arguments])
    finally:
        service.only_block(-1)
    last = (FRAMES * LABELS - 1) * HIDDEN * 2
    found = decode(np.frombuffer(service.read(output + last, HIDDEN * 2), np.uint16), "bf16")
    wanted = decode(f[-1], "bf16") + decode(g[-1], "bf16")
    np.testing.assert_allclose(found, wanted, rtol=ROUNDING["bf16"] * 1.01)
    service.free(output)
    device.close()
