"""FP8 back to numbers against the formats' definition, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import numpy as np
import pytest
from fp8_formats import DTYPES as FORMATS
from fp8_formats import values

from simt.element_types import DTYPES, encode
from simt.structs import make

THREADS, IN_BLOCK = 256, 4096


@pytest.mark.parametrize("format", range(4), ids=[str(d)[14:] for d in FORMATS])
@pytest.mark.parametrize("type, code", [("f32", 0), ("f16", 1), ("bf16", 2)])
def test_every_code(device, format, type, code):
    """All 256 codes in whole vectors, and a rest."""
    for count, vectors in ((4096 + 256, 1), (261, 0)):
        codes = (np.arange(count) % 256).astype(np.uint8)
        out = device.put(np.zeros(count, DTYPES[type]))
        arguments = make(
            "Fp8Dequantize", "fp8_dequantize.h", input=device.put(codes), scale_inv=device.put(np.float32([0.3])),
            output=out, count=count, type=code, format=format, vectors=vectors,
        )  # fmt: skip
        device.launch("fp8_dequantize_any", -(-count // IN_BLOCK), THREADS, [arguments])
        with np.errstate(over="ignore"):
            wide = values(codes, FORMATS[format]).astype(np.float32) * np.float32(0.3)
        number = ~np.isnan(wide)
        np.testing.assert_array_equal(out.numpy()[number], encode(wide, type)[number])
        found = out.numpy()[~number]
        wide_again = (found.astype(np.uint32) << 16).view(np.float32) if type == "bf16" else found
        assert np.isnan(wide_again).all()
