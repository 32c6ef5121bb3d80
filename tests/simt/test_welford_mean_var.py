"""welford_mean_var kernels against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import numpy as np
import pytest

from simt import channels
from simt.element_types import ROUNDING


@pytest.mark.parametrize("mean", [3.0, 1e4])
@pytest.mark.parametrize("case", channels.REDUCTIONS, ids=str)
def test_values(device, case, mean):
    t = channels.Tensors(device, case, mean)
    found = channels.reduce(t, "welford_mean_var")
    work = ROUNDING[case.math]
    np.testing.assert_allclose(found[: case.channels], t.x.mean((0, 2)), rtol=4 * work, atol=4 * work)
    np.testing.assert_allclose(found[case.channels : -1], t.x.var((0, 2)), rtol=64 * work, atol=0)
    assert found[-1] == case.batch * case.spatial
