"""layer_norm kernels against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import pytest

from simt import norms


@pytest.mark.parametrize("case", norms.CASES, ids=str)
def test_forward(device, case):
    norms.check_forward(device, "layer_norm", case)


@pytest.mark.parametrize("case", norms.CASES, ids=str)
def test_backward(device, case):
    norms.check_backward(device, "layer_norm", case)
