"""Block scaling's casts to FP8 against their rule, on everything that can serve them."""

from __future__ import annotations

import lists
import numpy as np
import pytest
import torch
from fp8_formats import DEFINITIONS, DTYPES, nearest_codes
from lists import BF16, F16, F32, F64
from torch.library import opcheck

from apex import _fp8
from apex._loader import bindings
from apex.reference import fp8

bindings.load()
op = torch.ops.apex.fp8_quantize_blocks
E4M3 = DTYPES[0]
SHAPES = [(0, 16), (4, 0), (1, 1), (2, 130), (3, 50, 136), (257, 128), (17,)]


def numpy(q):
    return q.contiguous().view(torch.uint8).cpu().numpy()


def inputs(shape, of, device):
    x = lists.random(of, device, (shape,), scale=3.0)[0]
    if x.numel() > 20:
        x.view(-1)[3], x.view(-1)[17] = float("nan"), 0.0
        x[-1] = 0
    return x


def blocks(x, high, fp8_max, power_of_two, epsilon):
    """(scale of each block, of each element) in numpy."""
    amax = np.zeros((-(-x.shape[0] // high), -(-x.shape[1] // 128)), np.float32)
    spread = np.ones(x.shape, np.float32)
    for i, j in np.ndindex(*amax.shape):
        cell = np.s_[i * high : (i + 1) * high, j * 128 : (j + 1) * 128]
        amax[i, j] = max(np.nanmax(np.abs(x[cell]), initial=0), np.float32(epsilon))
        scale = np.float32(fp8_max) / amax[i, j] if 0 < amax[i, j] < np.inf else np.float32(1)
        amax[i, j] = 2.0 ** np.floor(np.log2(scale.astype(np.float64))) if power_of_two else scale
        spread[cell] = amax[i, j]
    return amax, spread


@pytest.mark.parametrize("block", [(1, 128), (128, 128)], ids=["1x128", "128x128"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[14:])
@pytest.mark.parametrize("of", [F32, BF16, F16], ids=str)
def test_values(variant, dtype, of, block):
    fp8_max = float(DEFINITIONS[dtype].finite[-1])
    for shape in SHAPES:
        for power_of_two, epsilon in ((True, 0.0), (False, 0.5)):
            x = inputs(shape, of, variant.device)
            q, scale_inv, turned, turned_inv = _fp8.quantize_blocks(
                x, dtype, block, power_of_two, epsilon, True, True
            )
            width = shape[-1]
            wide = x.float().cpu().numpy().reshape(int(np.prod(shape[:-1])), width)
            assert q.shape == x.shape and turned.shape == wide.T.shape and q.dtype == turned.dtype == dtype
            scales, spread = blocks(wide, block[0], fp8_max, power_of_two, epsilon)
            np.testing.assert_array_equal(numpy(q).reshape(wide.shape), nearest_codes(wide * spread, dtype))
            np.testing.assert_array_equal(scale_inv.cpu().numpy(), np.float32(1) / scales)
            if block[0] == 1:
                scales, spread = blocks(wide.T, 1, fp8_max, power_of_two, epsilon)
            else:
                scales, spread = scales.T, spread.T
            np.testing.assert_array_equal(numpy(turned), nearest_codes(wide.T * spread, dtype))
            np.testing.assert_array_equal(turned_inv.cpu().numpy(), np.float32(1) / scales)


def test_layouts_that_are_asked_for(variant):
    x = inputs((140, 264), BF16, variant.device)
    whole = op(x, E4M3, False, True, True)
    assert whole[1].shape == (3, 140) and whole[3].shape == (2, 264)
    for square in (False, True):
        rows, columns = op(x, E4M3, square), op(x, E4M3, square, False, True)
        both = op(x, E4M3, square, True, True)
        assert rows[2].numel() == rows[3].numel() == columns[0].numel() == 0
        np.testing.assert_array_equal(numpy(rows[0]), numpy(both[0]))
        np.testing.assert_array_equal(numpy(columns[2]), numpy(both[2]))
        assert columns[1].numel() == (0 if not square else 6)
    np.testing.assert_array_equal(numpy(op(x.t(), E4M3)[0]), numpy(op(x.t().contiguous(), E4M3)[0]))


def test_against_the_reference_and_back(variant):
    x = inputs((130, 200), F32, variant.device).nan_to_num()
    for block in ((1, 128), (128, 128)):
        q, scale_inv, *_ = _fp8.quantize_blocks(x, E4M3, block)
        wanted, wanted_inv = fp8.quantize_blocks(x, E4M3, block)
        np.testing.assert_array_equal(numpy(q), numpy(wanted))
        assert torch.equal(scale_inv, wanted_inv)
        back = fp8.dequantize_blocks(q, scale_inv, F32, block)
        torch.testing.assert_close(back, x, rtol=0.07, atol=float(x.abs().max()) / 2**9)


def test_opcheck_and_refusals():
    x = inputs((5, 16), F32, "cpu").nan_to_num()  # opcheck compares NaN with itself
    opcheck(op, (x, E4M3, False, True, True))
    opcheck(op, (x, E4M3, True, False, True, False, 1e-3))
    for error, text, arguments in [
        (TypeError, "FP8 dtype must be", (x, F16)),
        (TypeError, "FP8 dtype must be", (x, None)),
        (TypeError, "takes float32, float16 and bfloat16", (x.to(F64), E4M3)),
        (ValueError, "at least one dimension", (x[0, 0], E4M3)),
        (RuntimeError, "has no derivative", (x.clone().requires_grad_(), E4M3)),
    ]:
        with pytest.raises(error, match=text):
            op(*arguments)
    with pytest.raises(ValueError, match="the block must be"):
        _fp8.quantize_blocks(x, E4M3, (128, 1))
