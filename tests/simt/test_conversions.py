"""Half and bfloat16 conversions of gpu.h, both ways, where rounding is decided, against numpy and float64."""

from __future__ import annotations

import numpy as np
import pytest

from simt.element_types import from_bfloat16

THREADS = 256
EVERY_16_BITS = np.arange(65536, dtype=np.uint16)


def _near(values: np.ndarray, steps) -> np.ndarray:
    """float32 values moved by each number of float32 steps."""
    return np.concatenate([(values.view(np.uint32) + np.uint32(step)).view(np.float32) for step in steps])


def _inputs() -> np.ndarray:
    """float32 values at, and one step beside, every border between two halves or two bfloat16s; any bits."""
    rng = np.random.default_rng(1)
    with np.errstate(all="ignore"):
        halves = EVERY_16_BITS.view(np.float16).astype(np.float32)
    bfloats = from_bfloat16(EVERY_16_BITS)
    subnormal = np.linspace(0, 2.0**-13, 65536).astype(np.float32)
    random_bits = rng.integers(0, 2**32, 1 << 18, dtype=np.uint64).astype(np.uint32).view(np.float32)
    return np.concatenate(
        [
            _near(halves, (0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF)),
            _near(bfloats, (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)),
            subnormal,
            -subnormal,
            random_bits,
        ]
    )


def _nearest_bfloat16(x: np.ndarray) -> np.ndarray:
    """Bits of the bfloat16 that is nearest to each finite float32, by distances in float64; ties to even."""
    below = (x.view(np.uint32) >> 16).astype(np.uint16)  # towards zero
    above = below + np.uint16(1)  # away from zero; past the largest: infinity
    far = from_bfloat16(above).astype(np.float64)
    far = np.where(np.isinf(far), np.copysign(np.float64(2.0**128), x), far)
    to_below = np.abs(x.astype(np.float64) - from_bfloat16(below).astype(np.float64))
    to_above = np.abs(far - x.astype(np.float64))
    down = (to_below < to_above) | ((to_below == to_above) & (below % 2 == 0))
    return np.where(down, below, above)


@pytest.fixture(scope="module")
def inputs() -> np.ndarray:
    return _inputs()


def test_rounding(selftest_device, inputs):
    """float -> 16 bits -> float. NaN stays a NaN; its payload is the platform's own."""
    x = inputs[::16] if selftest_device.emulated else inputs  # machine code runs 1000 times slower
    n = len(x)
    half, bfloat = selftest_device.full(n, 0, np.uint16), selftest_device.full(n, 0, np.uint16)
    from_half, from_bfloat = selftest_device.full(n, 0), selftest_device.full(n, 0)
    selftest_device.launch(
        "selftest_convert",
        -(-n // THREADS),
        THREADS,
        [selftest_device.put(x), half, bfloat, from_half, from_bfloat, n],
    )
    nan = np.isnan(x)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(np.float16)
    np.testing.assert_array_equal(half.numpy()[~nan], expected.view(np.uint16)[~nan])
    np.testing.assert_array_equal(from_half.numpy()[~nan], expected[~nan].astype(np.float32))
    finite = np.isfinite(x)
    nearest = _nearest_bfloat16(x[finite])
    np.testing.assert_array_equal(bfloat.numpy()[finite], nearest)
    np.testing.assert_array_equal(from_bfloat.numpy()[finite], from_bfloat16(nearest))
    np.testing.assert_array_equal(from_bfloat.numpy()[np.isinf(x)], x[np.isinf(x)])
    assert np.isnan(half.numpy().view(np.float16)[nan]).all() and np.isnan(from_half.numpy()[nan]).all()
    if selftest_device.emulated:  # its v_cvt_pk_bf16_f32 (gfx950) rounds the payload as if it were a number's
        nan &= (x.view(np.uint32) & 0xFFFF) == 0
    assert np.isnan(from_bfloat16(bfloat.numpy())[nan]).all() and np.isnan(from_bfloat.numpy()[nan]).all()


def test_every_16_bit_value_widens(selftest_device):
    """16 bits -> float, exactly."""
    n = 65536
    from_half, from_bfloat = selftest_device.full(n, 0), selftest_device.full(n, 0)
    bits = selftest_device.put(EVERY_16_BITS)
    selftest_device.launch("selftest_widen", n // THREADS, THREADS, [bits, bits, from_half, from_bfloat, n])
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(from_half.numpy(), EVERY_16_BITS.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(from_bfloat.numpy(), from_bfloat16(EVERY_16_BITS))
