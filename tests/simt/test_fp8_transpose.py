"""The transpose of FP8 matrices with its bias gradient, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import numpy as np
import pytest
from fp8_formats import DTYPES as FORMATS
from fp8_formats import values

from simt.structs import make

THREADS, ROWS, LANES = 256, 128, 16
# kernel, its width, rows, columns, format, with sums
CASES = [
    ("x16", 16, 128, 256, 0, True),
    ("x16", 16, 150, 272, 1, True),
    ("x16", 16, 32, 16, 2, False),
    ("x1", 1, 129, 17, 3, True),
    ("x1", 1, 3, 5, 0, False),
]


@pytest.mark.parametrize("kernel, width, rows, columns, format, sums", CASES, ids=str)
def test_transpose(device, kernel, width, rows, columns, format, sums):
    every = np.arange(256, dtype=np.uint8)
    finite = every[np.isfinite(values(every, FORMATS[format]))]
    codes = np.random.default_rng(rows).choice(finite, (rows, columns))
    parts = -(-rows // ROWS)
    out = device.put(np.zeros((columns, rows), np.uint8))
    grad_bias = device.put(np.zeros(columns, np.float32)) if sums else None
    partials = device.put(np.full((parts, columns), np.nan, np.float32)) if sums else None
    column_blocks = -(-columns // (LANES * width))
    arguments = make(
        "Fp8Transpose", "fp8_transpose.h", input=device.put(codes), output=out, partials=partials, grad_bias=grad_bias,
        scale_inv=device.put(np.float32([2.0**-8])), rows=rows, columns=columns, type=0, format=format,
        wide_columns=rows % 16 == 0, column_blocks=column_blocks,
    )  # fmt: skip
    device.launch(f"fp8_transpose_{kernel}", column_blocks * parts, THREADS, [arguments])
    np.testing.assert_array_equal(out.numpy(), codes.T)
    if sums:
        device.launch("fp8_transpose_sums", -(-columns // 8), 256, [arguments])
        wide = values(codes, FORMATS[format]) * 2.0**-8
        size = np.abs(wide).sum(0).max()
        np.testing.assert_allclose(grad_bias.numpy(), wide.sum(0), rtol=1e-6, atol=1e-6 * size)
