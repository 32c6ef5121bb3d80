"""RMS norm to FP8 against float64, on everything that can serve it."""

from __future__ import annotations

import fp8_norms
import lists
import pytest
import torch
from fp8_formats import DTYPES
from lists import BF16, F16, F32
from torch.library import opcheck

from apex import _fp8
from apex._loader import bindings

bindings.load()
op = torch.ops.apex.fp8_rms_norm
E4M3, E5M2 = DTYPES[:2]
# No rows; rows of a warp, of a block; odd and long ones.
SHAPES = [(0, 32), (3, 1), (2, 3, 64), (5, 72), (3, 1000), (2, 4096), (2, 67), (1, 40000)]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[14:])
@pytest.mark.parametrize("of", [F32, F16, BF16], ids=str)
def test_values(variant, dtype, of):
    for shape in SHAPES:
        if variant.simt and shape[-1] > 4096 and dtype is not E4M3:
            continue
        both = [fp8_norms.check(run(dtype), shape, of, dtype, variant.device, False) for _ in range(2)]
        assert torch.equal(both[0][0].view(torch.uint8), both[1][0].view(torch.uint8))


@pytest.mark.parametrize("zero_centered", [False, True], ids=["gamma", "zero-centred"])
@pytest.mark.parametrize("of, weight", [(BF16, F32), (F32, F16), (F16, F16)], ids=str)
def test_weights(variant, of, weight, zero_centered):
    """Of another dtype, none, and zero-centred ones: rows are multiplied by 1 + weight."""
    for shape in ((4, 264), (3, 70)):
        for weights in (True, False):
            fp8_norms.check(
                run(E4M3, zero_centered),
                shape,
                of,
                E4M3,
                variant.device,
                False,
                weights,
                weight,
                zero_centered,
            )


def test_layouts(variant):
    for change in (lambda t: t.t().contiguous().t(), lambda t: lists.misaligned([t])[0]):
        fp8_norms.check(run(E5M2), (6, 136), BF16, E5M2, variant.device, False, change=change)


def test_opcheck():
    x, w = lists.random(F32, "cpu", [(3, 16), (16,)])
    opcheck(op, arguments(x, w, fp8_norms.number(1.0, "cpu"), fp8_norms.number(0.0, "cpu"), E4M3, True))
    opcheck(op, arguments(x, None, fp8_norms.number(1.0, "cpu"), None, E5M2, False))


def test_refused():
    x, w, narrow = lists.random(F32, "cpu", [(3, 16), (16,), (8,)])
    scale = fp8_norms.number(1.0, "cpu")
    for error, text, given in [
        (TypeError, "FP8 dtype must be", (x, w, scale, None, F16, False)),
        (TypeError, "takes float32, float16 and bfloat16", (x.double(), None, scale, None, E4M3, False)),
        (TypeError, "takes float32, float16 and bfloat16", (x, w.double(), scale, None, E4M3, False)),
        (ValueError, "weight has shape", (x, narrow, scale, None, E4M3, False)),
        (TypeError, "scale must be float32", (x, w, scale.half(), None, E4M3, False)),
        (ValueError, "amax must have one element", (x, w, scale, w, E4M3, False)),
        (ValueError, "at least one dimension", (x[0, 0], None, scale, None, E4M3, False)),
        (RuntimeError, "has no derivative", (x.clone().requires_grad_(), w, scale, None, E4M3, False)),
    ]:
        with pytest.raises(error, match=text):
            op(*arguments(*given))


def arguments(x, weight, scale, amax, dtype, zero_centered):
    return x, weight, 1e-5, scale, amax, dtype, zero_centered


def run(dtype, zero_centered=False):
    def norm(x, w, b, scale, amax):
        q, rstd = _fp8.rms_norm(x, w, 1e-5, scale, dtype, amax, zero_centered)
        return q, None, rstd

    return norm
