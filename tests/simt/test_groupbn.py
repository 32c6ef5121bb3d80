"""groupbn kernels against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import numpy as np
import pytest

from simt import channels
from simt.element_types import DTYPES


@pytest.mark.parametrize("case", channels.MASKED_PASSES, ids=str)
def test_forward(device, case):
    t = channels.Tensors(device, case)
    expected = channels.normalized(t)
    bitmask = device.put(np.full((t.x.size + 7) // 8, 0x55, np.uint8))
    found = channels.apply(t, "groupbn_forward", bitmask=bitmask)
    channels.near(found, case.dtype, np.maximum(expected, 0))
    # Where rounding may decide the sign, either is right.
    sure = np.abs(expected) > 1e-5
    mask = np.unpackbits(bitmask.numpy(), bitorder="little")
    np.testing.assert_array_equal(mask[: t.x.size].reshape(t.x.shape)[sure], (expected > 0)[sure])
    assert not mask[t.x.size :].any()


@pytest.mark.parametrize("case", channels.MASKED_PASSES, ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_backward(device, case, masked):
    t = channels.Tensors(device, case)
    math = DTYPES[case.math]
    flags = channels.some_bits(t) if masked else np.ones(t.x.shape, bool)
    dy = np.where(flags, t.dy, 0)
    sums = [dy.sum((0, 2)).astype(math), (dy * (t.x - t.spread(t.mean))).sum((0, 2)).astype(math)]
    counts = np.array([case.batch, 5], np.int32)
    outputs = {}
    if case.z:
        outputs["grad_z"] = t.empty(t.x.shape, case.dtype, case.offset)
    if masked:
        outputs["bitmask"] = device.put(channels.bits(flags))
    found = channels.apply(
        t, "groupbn_backward", grad_output=t.put("dy", case.dtype, case.offset), sum_dy=device.put(sums[0]),
        sum_dy_xmu=device.put(sums[1]), count=device.put(counts), counts=2, count_is_int=1, **outputs,
    )  # fmt: skip
    n = counts.sum()
    along = t.spread(sums[1] / n * t.inv_std**2)
    g = dy - t.spread(sums[0] / n) - (t.x - t.spread(t.mean)) * along
    channels.near(found, case.dtype, g * t.spread(t.inv_std * t.weight))
    if case.z:
        np.testing.assert_array_equal(channels.decode(outputs["grad_z"].numpy(), case.dtype), dy)
