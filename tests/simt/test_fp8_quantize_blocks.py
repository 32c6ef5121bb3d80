"""Block scaling's casts against their rule in numpy, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import numpy as np
import pytest
from fp8_formats import DEFINITIONS, nearest_codes
from fp8_formats import DTYPES as FORMATS

from simt.element_types import decode, encode
from simt.structs import make

THREADS, SIDE = 256, 128


def blocks_of(x, high, wide, fp8_max, power_of_two, epsilon):
    """(scale of each block, scale of each element)"""
    rows, columns = x.shape
    scales = np.ones((-(-rows // high), -(-columns // wide)), np.float32)
    spread = np.ones(x.shape, np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            cell = np.s_[i * high : (i + 1) * high, j * wide : (j + 1) * wide]
            amax = max(np.nanmax(np.abs(x[cell]), initial=0), np.float32(epsilon))
            if 0 < amax < np.inf:
                scales[i, j] = np.float32(fp8_max) / np.float32(amax)
                if power_of_two:
                    scales[i, j] = 2.0 ** np.floor(np.log2(scales[i, j].astype(np.float64)))
            spread[cell] = scales[i, j]
    return scales, spread


# type and its number, rows, columns, format, square, power of two
CASES = [
    ("bf16", 2, 128, 256, 0, 0, 1),
    ("bf16", 2, 150, 136, 0, 1, 1),
    ("f16", 1, 9, 300, 1, 0, 1),
    ("f32", 0, 130, 128, 2, 0, 1),
    ("f32", 0, 131, 7, 3, 1, 1),
    ("bf16", 2, 48, 136, 0, 0, 0),
]


@pytest.mark.parametrize("type, code, rows, columns, format, square, power_of_two", CASES, ids=str)
def test_blocks(device, type, code, rows, columns, format, square, power_of_two):
    rng = np.random.default_rng(columns)
    x = rng.standard_normal((rows, columns)) * np.exp(rng.standard_normal((rows, 1)) * 2)
    x[min(3, rows - 1)], x[0, 0] = 0, np.nan
    x = encode(x, type)
    wide = decode(x, type).astype(np.float32)
    epsilon, maximum = 1e-3, float(DEFINITIONS[FORMATS[format]].finite[-1])
    high, across = -(-rows // SIDE), -(-columns // SIDE)
    by_row, by_column = (
        device.put(np.zeros((rows, columns), np.uint8)),
        device.put(np.zeros((columns, rows), np.uint8)),
    )
    scale_inv = device.put(np.zeros((high, across) if square else (across, rows), np.float32))
    turned = device.put(np.zeros((high, columns), np.float32))
    arguments = make(
        "Fp8QuantizeBlocks", "fp8_quantize_blocks.h", input=device.put(x), by_row=by_row, by_column=by_column,
        scale_inv=scale_inv, scale_inv_turned=turned, rows=rows, columns=columns, epsilon=epsilon, square=square,
        power_of_two=power_of_two, type=code, format=format, vectors=columns % 8 == 0, wide_columns=rows % 16 == 0,
        column_blocks=across,
    )  # fmt: skip
    device.launch("fp8_quantize_blocks_any", high * across, THREADS, [arguments])
    exact = (
        power_of_two or not device.emulated
    )  # the emulator's division is off by one unit in the last place

    def check(found, found_inv, layout, across_rows):
        scales, spread = blocks_of(layout, across_rows, SIDE, maximum, power_of_two, epsilon)
        if not exact:
            np.testing.assert_allclose(found_inv, np.float32(1) / scales, rtol=2.0**-21)
            return
        np.testing.assert_array_equal(found, nearest_codes(layout * spread, FORMATS[format]))
        np.testing.assert_array_equal(found_inv, np.float32(1) / scales)

    if square:
        check(by_row.numpy(), scale_inv.numpy(), wide, SIDE)
        np.testing.assert_array_equal(by_column.numpy(), by_row.numpy().T)
    else:
        check(by_row.numpy(), scale_inv.numpy().T, wide, 1)
        check(by_column.numpy(), turned.numpy().T, wide.T, 1)
