"""Casts of lists of tensors to FP8, on everything that can serve them: as one cast each."""

from __future__ import annotations

import lists
import numpy as np
import pytest
import torch
from fp8_formats import DTYPES
from lists import BF16, F16, F32
from op_calls import checks_of
from torch.library import opcheck

from apex import _fp8
from apex._loader import bindings

bindings.load()
op = torch.ops.apex.fp8_multi_quantize
E4M3, E5M2 = DTYPES[:2]


def numpy(q):
    return q.view(torch.uint8).cpu().numpy()


def check(inputs, dtype):
    """Against `quantize`, matrix by matrix."""
    device = inputs[0].device
    scales = torch.arange(1, len(inputs) + 1, dtype=F32, device=device)
    amaxes = torch.full((len(inputs),), 0.5, dtype=F32, device=device)
    rows, columns = _fp8.multi_quantize_transpose(inputs, scales, dtype, amaxes)
    for i, x in enumerate(inputs):
        amax = torch.full((1,), 0.5, dtype=F32, device=device)
        wanted = _fp8.quantize_transpose(x, scales[i], dtype, amax)
        for found, one in zip((rows[i], columns[i]), wanted, strict=True):
            assert found.shape == one.shape and found.dtype == dtype
            np.testing.assert_array_equal(numpy(found), numpy(one))
        assert amaxes[i] == amax


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[14:])
@pytest.mark.parametrize("of", [F32, F16, BF16], ids=str)
def test_values(variant, dtype, of):
    variant.mixed = True  # whatever serves `quantize`
    shapes = [(16, 32), (3, 5, 48), (0, 16), (130, 136)]
    check(lists.random(of, variant.device, shapes, scale=3.0), dtype)
    check(lists.random(of, variant.device, [*shapes, (5, 7), (3, 0)], scale=3.0), dtype)


def test_more_than_a_launch_takes(variant):
    variant.mixed = True
    check(lists.random(BF16, variant.device, [(3, 8 + i % 3) for i in range(150)]), E4M3)


def test_one_layout_and_views(variant):
    x = lists.random(BF16, variant.device, [(16, 48), (32, 16)])
    inputs, scales = [x[0].t(), x[1][::2]], torch.ones(2, dtype=F32, device=variant.device)
    both = _fp8.multi_quantize_transpose(inputs, scales, E5M2)
    columns = [torch.zeros_like(t.view(torch.uint8)).view(E5M2) for t in both[1]]
    version = columns[0]._version
    op(scales, None, inputs, [], columns)
    assert columns[0]._version > version
    for found, wanted in zip(columns, both[1], strict=True):
        np.testing.assert_array_equal(numpy(found), numpy(wanted))
    op(scales[:0], None, [], [], [])


def test_opcheck_and_refusals():
    x = [torch.ones(2, 4, dtype=F32, device="cpu"), torch.ones(3, 4, dtype=F32, device="cpu")]
    scales = torch.ones(2, dtype=F32, device="cpu")
    rows, columns = _fp8.multi_quantize_transpose(x, scales, E4M3)
    opcheck(op, (scales, scales.clone(), x, rows, columns), test_utils=checks_of({"rows": rows}))
    for error, text, arguments in [
        (ValueError, "neither rows nor columns", (scales, None, x, [], [])),
        (ValueError, "2 inputs, 1 rows", (scales, None, x, rows[:1], columns)),
        (ValueError, r"scales has shape \[1\], not \[2\]", (scales[:1], None, x, rows, columns)),
        (TypeError, "scales must be float32", (scales.half(), None, x, rows, columns)),
        (ValueError, "amaxes has shape", (scales, scales[:1], x, rows, columns)),
        (TypeError, "inputs have the dtypes", (scales, None, [x[0], x[1].half()], rows, columns)),
        (TypeError, "FP8 dtype must be", (scales, None, x, x, columns)),
        (ValueError, r"columns\[1\] has shape", (scales, None, x, rows, [columns[0], rows[1]])),
        (ValueError, r"columns\[0\] must be contiguous", (scales, None, x, [], [rows[0].t(), columns[1]])),
        (TypeError, "one dtype", (scales, None, x, rows, [t.view(E5M2) for t in columns])),
        (
            RuntimeError,
            "has no derivative",
            (scales, None, [x[0].clone().requires_grad_(), x[1]], rows, columns),
        ),
    ]:
        with pytest.raises(error, match=text):
            op(*arguments)
