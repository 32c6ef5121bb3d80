"""relu_bw against float64, on everything that can serve it."""

from __future__ import annotations

import channels
import pytest
import torch
from channels import EVERY, SOME, Case
from lists import BF16, F16, F32

from apex._loader import bindings

bindings.load()
relu_bw = torch.ops.apex.relu_bw


def check(case, z=True):
    found = relu_bw(
        case.dy, case.x, case.z if z else None, case.mean, case.inv_std, case.weight, case.shift, case.last
    )
    assert found.dtype == case.dy.dtype
    before = case.forward(z, relu=False)
    sure = before.abs() > 1e-5  # nearer to 0 the sign is a matter of rounding
    expected = torch.where(before > 0, case.dy.cpu(), 0)
    assert torch.equal(found.cpu()[sure], expected[sure])
    assert sure.float().mean() > 0.99 or not case.x.numel()


@pytest.mark.parametrize("dtype", channels.DTYPES, ids=str)
def test_values(variant, dtype):
    for layout, shape in EVERY:
        check(Case(layout, shape, dtype, variant.device))
    if variant.simt:
        assert {name.rsplit("_", 1)[0] for name in variant.kernels} == {"relu_bw_any", "relu_bw_last"}


@pytest.mark.parametrize("dtype, weight", [(F16, F32), (BF16, F32), (F32, F16)], ids=str)
def test_mixed_dtypes(variant, dtype, weight):
    for layout, shape in SOME:
        check(Case(layout, shape, dtype, variant.device, weight_dtype=weight), z=False)
        check(Case(layout, shape, dtype, variant.device, affine=False), z=False)


def test_refused(variant):
    case = Case("first", (2, 4, 6), F32, variant.device)
    with pytest.raises(ValueError, match="not the input's"):
        relu_bw(case.dy[:1], case.x, None, case.mean, case.inv_std)
    with pytest.raises(TypeError, match="grad_output must be a tensor, not None"):
        relu_bw(None, case.x, None, case.mean, case.inv_std)


def test_traced():
    for layout, shape in [("first", (2, 3, 5)), ("last", (4, 8)), ("memory", (2, 8, 3, 3))]:
        case = Case(layout, shape, F32, "cpu")
        arguments = (case.dy, case.x, case.z, case.mean, case.inv_std, case.weight, case.shift, case.last)
        torch.library.opcheck(relu_bw.default, arguments)
