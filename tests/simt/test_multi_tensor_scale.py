"""multi_tensor_scale kernels against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import numpy as np
import pytest

from simt.element_types import ROUNDING, decode, encode
from simt.multi_tensor import THREADS, tensor_table
from simt.structs import make

PAIRS = [(a, b) for a in ("f32", "f16", "bf16") for b in ("f32", "f16", "bf16")] + [("f64", "f64")]
# Nothing, one, less than a vector, a chunk and a bit, several chunks; some views unaligned.
SIZES = (0, 1, 7, 1031, 2048, 5003)
MISALIGNED = (0, 1, 0, 1, 0, 0)
CHUNK = 1024


def _run(device, source, target, inputs, scale, scale_on_device=None, grid=3):
    """Launches the kernel: (outputs as float64, flag)."""

    def put(values, name, skip):
        array = encode(values, name)
        return device.put(array, offset=array.itemsize * skip)

    ins = [put(x, source, skip) for x, skip in zip(inputs, MISALIGNED, strict=False)]
    outs = [put(np.full(x.shape, 7.0), target, skip) for x, skip in zip(inputs, MISALIGNED, strict=False)]
    flag = device.full(1, 0, np.int32)
    table = tensor_table(device, [ins, outs], [x.size for x in inputs], CHUNK)
    arguments = make(
        "ScaleArguments", "multi_tensor_scale.h", scale=scale, scale_on_device=scale_on_device, noop_flag=flag
    )
    device.launch(f"multi_tensor_scale_{source}_{target}", grid, THREADS, [table, arguments])
    return [decode(out.numpy(), target) for out in outs], int(flag.numpy()[0])


@pytest.mark.parametrize("source, target", PAIRS, ids=lambda name: name)
def test_values(device, source, target):
    rng = np.random.default_rng(3)
    inputs = [decode(encode(rng.standard_normal(n), source), source) for n in SIZES]
    outputs, flag = _run(device, source, target, inputs, 0.37)
    assert flag == 0
    math = "f64" if target == "f64" else "f32"
    for x, y in zip(inputs, outputs, strict=True):
        tolerance = 1.01 * ROUNDING[target] + 3 * ROUNDING[math]
        np.testing.assert_allclose(y, x * 0.37, rtol=tolerance, atol=2.0**-25 if target == "f16" else 0)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_flags_what_is_not_finite(device, bad):
    inputs = [np.ones(n) for n in SIZES]
    inputs[-1][-1] = bad
    outputs, flag = _run(device, "f32", "f16", inputs, 1.0)
    assert flag == 1
    np.testing.assert_array_equal(outputs[-1], inputs[-1])


def test_scale_on_device(device):
    factor = device.put(np.array([0.25], np.float32))
    outputs, flag = _run(device, "f32", "f32", [np.full(n, 2.0) for n in SIZES], 99.0, factor)
    assert flag == 0
    assert all((y == 0.5).all() for y in outputs)
