"""Norms to FP8 against float64: what test_fp8_layer_norm and test_fp8_rms_norm share."""

from __future__ import annotations

import lists
import numpy as np
import pytest
import torch
from fp8_formats import DTYPES, nearest_codes, values
from lists import BF16, F16, F32, F64
from torch.library import opcheck

SCALE = 1.3
E4M3, E5M2 = DTYPES[:2]
# No rows; rows of a warp, of a block; odd and long ones.
SHAPES = [(0, 32), (3, 1), (2, 3, 64), (5, 72), (3, 1000), (2, 4096), (2, 67), (1, 40000)]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[14:])
each_input = pytest.mark.parametrize("of", [F32, F16, BF16], ids=str)
each_zero_centered = pytest.mark.parametrize("zero_centered", [False, True], ids=["gamma", "zero-centred"])
each_weight = pytest.mark.parametrize("of, weight", [(BF16, F32), (F32, F16), (F16, F16)], ids=str)


def number(value, device):
    return torch.tensor([value], dtype=F32, device=device)


def check(
    run, shape, of, dtype, device, centered, weights=True, weight_dtype=None, zero_centered=False, change=None
):
    """Calls run(x, weight, bias, scale, amax) -> (q, mean or None, rstd) and compares; returns the results."""
    x = lists.random(of, device, (shape,), scale=2.0)[0]
    x = x if change is None else change(x)
    w, b = (
        lists.random(weight_dtype or of, device, ((shape[-1],),), seed=s)[0] if weights else None
        for s in (2, 3)
    )
    amax = number(0.01, device)
    q, mean, rstd = run(x, w, b if centered else None, number(SCALE, device), amax)
    wide = x.to("cpu", F64)
    middle = wide.mean(-1, keepdim=True) if centered else torch.zeros(1, dtype=F64, device="cpu")
    by = (wide - middle).square().mean(-1, keepdim=True).add(1e-5).rsqrt()
    y = (wide - middle) * by
    if weights:
        y = y * (w.to("cpu", F64) + zero_centered) + (b.to("cpu", F64) if centered else 0)
    assert q.shape == x.shape and q.dtype == dtype and q.is_contiguous()
    near(q.view(torch.uint8).cpu().numpy(), y.numpy(), dtype)
    rows = int(np.prod(shape[:-1]))
    assert rstd.shape == (rows,) and rstd.dtype == F32
    if y.numel():
        torch.testing.assert_close(amax.item(), max(0.01, y.abs().max().item()), rtol=1e-4, atol=0)
        torch.testing.assert_close(rstd.cpu().double(), by.reshape(-1), rtol=1e-4, atol=1e-6)
        if centered:
            torch.testing.assert_close(mean.cpu().double(), middle.reshape(-1), rtol=1e-4, atol=1e-5)
    return q, rstd, amax


def near(found, y, dtype):
    margin = np.abs(y) * 3e-4 + 2e-5
    low, high = (values(nearest_codes((y + m) * np.float32(SCALE), dtype), dtype) for m in (-margin, margin))
    assert ((low <= values(found, dtype)) & (values(found, dtype) <= high)).all()


# ---- the cases; run(dtype, zero_centered) gives what `check` calls, arguments(...) those of the op ----------------


def check_values(run, variant, dtype, of, centered):
    for shape in SHAPES:
        if variant.simt and shape[-1] > 4096 and dtype is not E4M3:
            continue
        both = [check(run(dtype), shape, of, dtype, variant.device, centered) for _ in range(2)]
        assert torch.equal(both[0][0].view(torch.uint8), both[1][0].view(torch.uint8))


def check_weights(run, variant, of, weight, zero_centered, centered):
    """Of another dtype, none, and zero-centred ones: rows are multiplied by 1 + weight."""
    for shape in ((4, 264), (3, 70)):
        for weights in (True, False):
            norm = run(E4M3, zero_centered)
            check(norm, shape, of, E4M3, variant.device, centered, weights, weight, zero_centered)


def check_layouts(run, variant, centered):
    for change in (lambda t: t.t().contiguous().t(), lambda t: lists.misaligned([t])[0]):
        check(run(E5M2), (6, 136), BF16, E5M2, variant.device, centered, change=change)


def check_with_opcheck(op, arguments):
    x, w = lists.random(F32, "cpu", [(3, 16), (16,)])
    opcheck(op, arguments(x, w, number(1.0, "cpu"), number(0.0, "cpu"), E4M3, True))
    opcheck(op, arguments(x, None, number(1.0, "cpu"), None, E5M2, False))


def check_refused(op, arguments):
    x, w, narrow = lists.random(F32, "cpu", [(3, 16), (16,), (8,)])
    scale = number(1.0, "cpu")
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
