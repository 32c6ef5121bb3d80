"""FP8 back to numbers against the formats' definition, on everything that can serve it."""

from __future__ import annotations

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
op = torch.ops.apex.fp8_dequantize
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[14:])


def number(value, device="cpu"):
    return torch.tensor([value], dtype=F32, device=device)


def fp8(count, dtype, device="cpu"):
    """Codes 0 to 255 over and over."""
    return torch.arange(count, dtype=torch.int32, device=device).to(torch.uint8).view(dtype)


@each_dtype
@pytest.mark.parametrize("of", [F32, F16, BF16], ids=str)
def test_every_code(variant, dtype, of):
    """All 256, times a scale, rounded once; whole vectors, and odd counts."""
    for count in (256, 4096 + 256, 261, 1, 0):
        for scale in (1.0, 0.3):
            found = op(fp8(count, dtype, variant.device), number(scale, variant.device), of)
            wide = values(np.arange(count) % 256, dtype).astype(np.float32) * np.float32(scale)
            expected = torch.from_numpy(wide).to(of)
            assert found.dtype == of
            torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)
            number_ = ~np.isnan(wide)
            np.testing.assert_array_equal(
                torch.signbit(found).cpu().numpy()[number_], np.signbit(wide)[number_]
            )


def test_layouts_and_shapes(variant):
    q = fp8(6 * 32, DTYPES[0], variant.device).view(2, 3, 32)
    scale = number(2.0, variant.device)
    expected = op(q, scale)
    assert expected.shape == (2, 3, 32) and expected.dtype == F32
    turned = q.transpose(0, 1)
    assert torch.equal(op(turned, scale).nan_to_num(), expected.transpose(0, 1).nan_to_num())
    assert torch.equal(op(q.view(-1)[1:], scale).nan_to_num(), expected.view(-1)[1:].nan_to_num())
    assert torch.equal(_fp8.dequantize(q, scale, F16).nan_to_num(), expected.half().nan_to_num())


def test_opcheck_and_refusals():
    q, scale = fp8(32, DTYPES[1]).view(4, 8), number(1.0)
    opcheck(op, (q, scale, BF16), test_utils=checks_of({"q": q}))
    for error, text, arguments in [
        (TypeError, "FP8 dtype must be", (q.float(), scale)),
        (TypeError, "takes float32, float16 and bfloat16", (q, scale, F64)),
        (TypeError, "scale_inv must be float32", (q, scale.half())),
        (ValueError, "scale_inv must have one element", (q, scale.expand(2))),
        (ValueError, "meta", (q, scale.to("meta"))),
        (ValueError, "at least one dimension", (q[0, 0], scale)),
    ]:
        with pytest.raises(error, match=text):
            op(*arguments)
