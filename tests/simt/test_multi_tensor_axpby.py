"""multi_tensor_axpby kernels against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from simt.element_types import ROUNDING, decode, encode
from simt.multi_tensor import THREADS, tensor_table
from simt.structs import make

HALVES = ("f32", "f16", "bf16")
TYPES = [*itertools.product(HALVES, repeat=3), ("f64", "f64", "f64")]
# Nothing, one, less than a vector, several chunks; an unaligned view of more than a vector.
SIZES = (0, 1, 7, 2053, 1031)
MISALIGNED = (0, 0, 0, 0, 1)
CHUNK = 1024
A, B = 0.37, -1.9
BOTH, X, Y = -1, 0, 1


def _values(name, seed, sizes=SIZES):
    rng = np.random.default_rng(seed)
    return [decode(encode(rng.standard_normal(n), name), name) for n in sizes]


def _run(device, types, x, y, check=BOTH, noop=0):
    """Launches the kernel: (outputs as float64, flag)."""

    def put(values, name):
        arrays = [encode(v, name) for v in values]
        return [device.put(a, offset=a.itemsize * skip) for a, skip in zip(arrays, MISALIGNED, strict=False)]

    buffers = [put(x, types[0]), put(y, types[1]), put([np.full(v.shape, 7.0) for v in x], types[2])]
    flag = device.full(1, noop, np.int32)
    table = tensor_table(device, buffers, [v.size for v in x], CHUNK)
    arguments = make("AxpbyArguments", "multi_tensor_axpby.h", a=A, b=B, check=check, noop_flag=flag)
    device.launch(f"multi_tensor_axpby_{'_'.join(types)}", 3, THREADS, [table, arguments])
    return [decode(out.numpy(), types[2]) for out in buffers[2]], int(flag.numpy()[0])


@pytest.mark.parametrize("types", TYPES, ids="_".join)
def test_values(device, types):
    x, y = _values(types[0], 3), _values(types[1], 4)
    outputs, flag = _run(device, types, x, y)
    assert flag == 0
    math = ROUNDING["f64" if types[2] == "f64" else "f32"]
    for left, right, found in zip(x, y, outputs, strict=True):
        terms = abs(A * left) + abs(B * right)  # the arithmetic's error is relative to these
        error = np.abs(found - (A * left + B * right))
        allowed = 1.01 * ROUNDING[types[2]] * np.abs(A * left + B * right) + 4 * math * terms
        assert (error <= allowed + (2.0**-25 if types[2] == "f16" else 0)).all()


@pytest.mark.parametrize("check", [BOTH, X, Y])
@pytest.mark.parametrize("place", [X, Y])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_flags_what_is_asked_for(device, bad, place, check):
    inputs = [_values("f16", 3), _values("f32", 4)]
    inputs[place][3][2052] = bad
    outputs, flag = _run(device, ("f16", "f32", "f32"), *inputs, check)
    assert flag == (check in (BOTH, place))
    assert not np.isfinite(outputs[3][2052])


def test_a_result_that_overflows_is_not_flagged(device):
    x = [np.full(n, 6e4) for n in SIZES]
    outputs, flag = _run(device, ("f16", "f16", "f16"), x, [-v for v in x])
    assert flag == 0
    assert np.isinf(outputs[3]).all()


def test_a_raised_flag_stays_and_stops_nothing(device):
    x, y = _values("f32", 3), _values("f32", 4)
    outputs, flag = _run(device, ("f32", "f32", "f32"), x, y, noop=1)
    assert flag == 1
    np.testing.assert_allclose(outputs[3], A * x[3] + B * y[3], rtol=1e-5, atol=1e-6)
