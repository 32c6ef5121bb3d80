"""Norms to FP8 against float64: what test_fp8_layer_norm and test_fp8_rms_norm share."""

from __future__ import annotations

import lists
import numpy as np
import torch
from fp8_formats import nearest_codes, values
from lists import F32, F64

SCALE = 1.3


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
