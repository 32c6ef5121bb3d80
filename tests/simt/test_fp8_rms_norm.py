"""Kernels of RMS norm to FP8 against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import pytest

from simt import fp8_norms


@pytest.mark.parametrize("case, format, zero_centered", fp8_norms.CASES, ids=str)
def test_forward(device, case, format, zero_centered):
    fp8_norms.check(device, "fp8_rms_norm", case, format, zero_centered)


@pytest.mark.parametrize("case, format, zero_centered", fp8_norms.HELD, ids=str)
def test_held_rows(device, case, format, zero_centered):
    if device.emulated:
        pytest.skip("CUDA alone has these kernels")
    fp8_norms.check(device, "fp8_rms_norm", case, format, zero_centered)
