"""batchnorm kernels against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import numpy as np
import pytest

from simt import channels
from simt.element_types import DTYPES


@pytest.mark.parametrize("case", channels.PASSES, ids=str)
def test_forward(device, case):
    t = channels.Tensors(device, case)
    expected = channels.normalized(t)
    found = channels.apply(t, "batchnorm_forward")
    channels.near(found, case.dtype, np.maximum(expected, 0) if case.relu else expected)


@pytest.mark.parametrize("case", channels.PASSES, ids=str)
def test_backward(device, case):
    t = channels.Tensors(device, case)
    math = DTYPES[case.math]
    sums = [t.dy.sum((0, 2)).astype(math), (t.dy * (t.x - t.spread(t.mean))).sum((0, 2)).astype(math)]
    counts = np.array([case.batch * case.spatial, 5], np.int32)
    found = channels.apply(
        t, "batchnorm_backward", grad_output=t.put("dy", case.dtype, case.offset), sum_dy=device.put(sums[0]),
        sum_dy_xmu=device.put(sums[1]), count=device.put(counts), counts=2, count_is_int=1,
    )  # fmt: skip
    n = counts.sum()
    along = t.spread(sums[1] / n * t.inv_std**2)
    g = t.dy - t.spread(sums[0] / n) - (t.x - t.spread(t.mean)) * along
    channels.near(found, case.dtype, g * t.spread(t.inv_std * t.weight))
