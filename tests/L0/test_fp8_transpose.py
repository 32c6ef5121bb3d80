"""The transpose of FP8 matrices, and the bias gradient beside it, on everything that can serve them."""

from __future__ import annotations

import activations
import lists
import numpy as np
import pytest
import torch
from fp8_formats import DTYPES, values
from lists import BF16, F16, F32, F64
from op_calls import checks_of
from torch.library import opcheck

from apex import _fp8
from apex._loader import bindings

bindings.load()
op = torch.ops.apex.fp8_transpose
SHAPES = [(0, 32), (3, 0), (1, 1), (5, 7), (2, 3, 48), (300, 272), (129, 40), (17,)]


def number(value, device="cpu"):
    return torch.tensor([value], dtype=F32, device=device)


def fp8(shape, dtype, device="cpu"):
    """Any finite codes."""
    finite = np.flatnonzero(np.isfinite(values(np.arange(256), dtype))).astype(np.uint8)
    found = np.random.default_rng(sum(shape)).choice(finite, shape)
    return torch.from_numpy(found).to(device).view(dtype)


def numpy(q):
    return q.contiguous().view(torch.uint8).cpu().numpy()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[14:])
def test_values(variant, dtype):
    for shape in SHAPES:
        q = fp8(shape, dtype, variant.device)
        flat = numpy(q).reshape(int(np.prod(shape[:-1])), shape[-1])
        for of in (F32, BF16, F16):
            columns, sums = op(q, number(2.0**-9, variant.device), True, of)
            assert columns.dtype == dtype and columns.is_contiguous() and sums.dtype == of
            np.testing.assert_array_equal(numpy(columns), flat.T)
            wide = values(flat, dtype) * 2.0**-9
            activations.near(sums, torch.from_numpy(wide.sum(0)), max(1, len(wide)) * 256)
        alone = op(q)
        np.testing.assert_array_equal(numpy(alone[0]), flat.T)
        assert alone[1].numel() == 0
        lists.assert_same_bits(
            [op(q, number(1.0, variant.device), True)[1]], [op(q, number(1.0, variant.device), True)[1]]
        )


def test_layouts(variant):
    q = fp8((48, 32), DTYPES[0], variant.device)
    np.testing.assert_array_equal(numpy(op(q.t())[0]), numpy(q))
    np.testing.assert_array_equal(numpy(op(q[1:])[0]), numpy(q)[1:].T)
    odd = q.view(-1)[1 : 1 + 32 * 47].view(47, 32)
    np.testing.assert_array_equal(numpy(op(odd)[0]), numpy(odd).T)
    np.testing.assert_array_equal(numpy(_fp8.transpose(q)), numpy(q).T)
    assert _fp8.transpose_bias_gradient(q, number(1.0, variant.device), BF16)[1].dtype == BF16


def test_opcheck_and_refusals():
    q, scale = fp8((4, 8), DTYPES[1]), number(1.0)
    opcheck(op, (q, scale, True, BF16), test_utils=checks_of({"q": q}))
    opcheck(op, (q,), test_utils=checks_of({"q": q}))
    for error, text, arguments in [
        (TypeError, "FP8 dtype must be", (q.float(),)),
        (TypeError, "takes float32, float16 and bfloat16", (q, scale, True, F64)),
        (ValueError, "a bias gradient needs scale_inv", (q, None, True)),
        (TypeError, "scale_inv must be float32", (q, scale.half(), True)),
        (ValueError, "scale_inv must have one element", (q, scale.expand(2), True)),
        (ValueError, "at least one dimension", (q[0, 0],)),
    ]:
        with pytest.raises(error, match=text):
            op(*arguments)
