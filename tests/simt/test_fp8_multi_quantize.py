"""Casts of many matrices to FP8 in one launch, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from fp8_formats import DTYPES as FORMATS
from fp8_formats import nearest_codes

from simt.element_types import decode, encode

THREADS, ROWS, LANES, MOST = 256, 128, 16, 64


class Arguments(ctypes.Structure):
    """As csrc/device/fp8_multi_quantize.h has it."""

    _fields_ = [
        *((name, ctypes.c_uint64 * MOST) for name in ("input", "by_row", "by_column", "rows", "columns")),
        ("first_block", ctypes.c_uint32 * MOST),
        ("scale", ctypes.c_uint64),
        ("amax", ctypes.c_uint64),
        *((name, ctypes.c_int32) for name in ("count", "type", "format", "reserved")),
    ]


# kernel, width, type and its number, shapes
CASES = [
    ("bf16x8", 8, "bf16", 2, [(16, 32), (130, 136), (0, 8), (3, 8)]),
    ("f16x8", 8, "f16", 1, [(8, 8)]),
    ("f32x4", 4, "f32", 0, [(140, 68), (16, 4)]),
    ("any1", 1, "bf16", 2, [(5, 7), (1, 0), (129, 18), (1, 1)]),
]


@pytest.mark.parametrize(
    "kernel, width, type, code, shapes", CASES, ids=lambda v: v if isinstance(v, str) else ""
)
def test_multi(device, kernel, width, type, code, shapes):
    rng = np.random.default_rng(1)
    inputs = [encode(rng.standard_normal(shape) * 5, type) for shape in shapes]
    scales = (rng.random(len(shapes)) + 0.5).astype(np.float32)
    held = [
        (
            device.put(x),
            device.put(np.zeros(x.shape, np.uint8)),
            device.put(np.zeros(x.shape[::-1], np.uint8)),
        )
        for x in inputs
    ]
    scale, amax = device.put(scales), device.put(np.zeros(len(shapes), np.float32))
    a, blocks = Arguments(scale=scale.address, amax=amax.address, count=len(shapes), type=code, format=1), 0
    for i, (buffers, (rows, columns)) in enumerate(zip(held, shapes, strict=True)):
        a.input[i], a.by_row[i], a.by_column[i] = (b.address for b in buffers)
        a.rows[i], a.columns[i], a.first_block[i] = rows, columns, blocks
        blocks += -(-rows // ROWS) * -(-columns // (LANES * width))
    device.launch(f"fp8_multi_quantize_{kernel}", blocks, THREADS, [a])
    for i, x in enumerate(inputs):
        wide = decode(x, type).astype(np.float32)
        expected = nearest_codes(wide * scales[i], FORMATS[1])
        np.testing.assert_array_equal(held[i][1].numpy(), expected)
        np.testing.assert_array_equal(held[i][2].numpy(), expected.T)
        assert amax.numpy()[i] == np.abs(wide).max(initial=0)
