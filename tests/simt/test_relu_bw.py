"""relu_bw kernels against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import numpy as np
import pytest

from simt import channels
from simt.element_types import decode


@pytest.mark.parametrize("case", channels.PASSES, ids=str)
def test_values(device, case):
    t = channels.Tensors(device, case)
    before = channels.normalized(t)
    found = decode(channels.apply(t, "relu_bw", grad_output=t.put("dy", case.dtype, case.offset)), case.dtype)
    sure = np.abs(before) > 1e-5  # nearer to 0 the sign is a matter of rounding
    assert sure.mean() > 0.99
    np.testing.assert_array_equal(found[sure], np.where(before > 0, t.dy, 0)[sure])
