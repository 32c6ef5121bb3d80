"""reduce_bn against float64, on everything that can serve it."""

from __future__ import annotations

import channels
import lists
import pytest
import torch
from channels import EVERY, SOME, Case, near
from lists import BF16, F16, F32

from apex._loader import bindings
from apex.reference import _channels

bindings.load()
reduce = torch.ops.apex.reduce_bn


def check(case):
    sums, grad_weight, grad_bias = reduce(case.dy, case.x, case.mean, case.inv_std, case.weight, case.last)
    of_dy = case.dy64.sum(case.over)
    of_dy_xmu = (case.dy64 * (case.x64 - case.spread(case.mean64))).sum(case.over)
    assert sums.dtype == case.mean.dtype
    near(sums, torch.cat([of_dy, of_dy_xmu]))
    if case.weight is None:
        assert grad_weight.numel() == grad_bias.numel() == 0
    else:
        assert grad_weight.dtype == grad_bias.dtype == case.weight.dtype
        near(grad_weight, of_dy_xmu * case.inv_std64, loose=2)
        near(grad_bias, of_dy)
    return sums, grad_weight, grad_bias


@pytest.mark.parametrize("dtype", channels.DTYPES, ids=str)
def test_values(variant, dtype):
    for layout, shape in EVERY:
        check(Case(layout, shape, dtype, variant.device))
    if variant.simt:
        assert {name.rsplit("_", 1)[0] for name in variant.kernels} == {
            f"reduce_bn_{kind}" for kind in ("first", "last", "last1")
        }


@pytest.mark.parametrize("dtype, weight", [(F16, F32), (BF16, F32), (F32, F16)], ids=str)
def test_mixed_dtypes(variant, dtype, weight):
    for layout, shape in SOME:
        check(Case(layout, shape, dtype, variant.device, weight_dtype=weight))


def test_layouts(variant):
    """No weight; gradients that lie otherwise than the input, in memory and against vectors; expanded ones."""
    for layout, shape in [
        ("first", (3, 4, 8, 8)),
        ("first", (5, 4, 33)),
        ("memory", (3, 16, 4, 5)),
        ("last", (7, 5, 16)),
    ]:
        case = Case(layout, shape, F16, variant.device, affine=False)
        check(case)
        if case.x.dim() == 4:
            case.dy = case.dy.contiguous(memory_format=torch.channels_last)
            check(case)
        case.dy = lists.misaligned([case.dy.contiguous()])[0]
        check(case)
        case.x = lists.misaligned([case.x.contiguous()])[0]
        check(case)
    case = Case("first", (3, 4, 8), F32, variant.device)
    case.dy, case.dy64 = (
        torch.ones(1, 1, 1, dtype=F32, device="cpu").to(case.x).expand(3, 4, 8),
        torch.ones(3, 4, 8, dtype=F32, device="cpu").double(),
    )
    check(case)


def test_large_mean(variant):
    case = Case("first", (40, 3, 60), F32, variant.device, mean=1e4)
    check(case)


@pytest.mark.parametrize("layout, shape", [("first", (130, 2, 88)), ("last", (1100, 8))])
def test_same_bits(variant, layout, shape):
    case = Case(layout, shape, BF16, variant.device)
    lists.assert_same_bits(check(case), check(case))


def test_refused(variant):
    case = Case("first", (2, 4, 6), F32, variant.device)
    with pytest.raises(ValueError, match="not the input's"):
        reduce(case.dy[:, :, :3], case.x, case.mean, case.inv_std)
    with pytest.raises(ValueError, match=r"has shape .*, not .*\[4\]"):
        reduce(case.dy, case.x, case.mean[:2], case.inv_std)
    with pytest.raises(TypeError, match="float64 goes with float64"):
        reduce(case.dy, case.x, case.mean, case.inv_std, case.weight.double())
    for none in range(3):
        given = [case.dy, case.mean, case.inv_std]
        given[none] = None
        with pytest.raises(TypeError, match="must be a tensor, not None"):
            reduce(given[0], case.x, *given[1:])


@pytest.mark.parametrize("dtype", channels.DTYPES, ids=str)
def test_masked(variant, dtype):
    """Gradients whose bit is not set count as 0, infinite ones too."""
    for layout, shape in [
        ("last", (70, 8)),
        ("last", (9, 131)),
        ("memory", (3, 16, 4, 5)),
        ("last", (1100, 8)),
    ]:
        case = Case(layout, shape, dtype, variant.device)
        kept = torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=F32, device="cpu") < 0.5
        case.dy[~kept.to(case.dy.device)] = float("inf")
        case.dy64 = torch.where(kept, case.dy64, 0)
        mask = _channels.pack(kept, case.last).to(case.dy.device)
        sums, _, grad_bias = reduce(case.dy, case.x, case.mean, case.inv_std, case.weight, case.last, mask)
        of_dy = case.dy64.sum(case.over)
        of_dy_xmu = (case.dy64 * (case.x64 - case.spread(case.mean64))).sum(case.over)
        near(sums, torch.cat([of_dy, of_dy_xmu]))
        near(grad_bias, of_dy)
    if variant.simt:
        assert {name.rsplit("_", 1)[0] for name in variant.kernels} == {
            f"reduce_bn_masked_{kind}" for kind in ("last", "last1")
        }


def test_mask_refused(variant):
    case = Case("last", (6, 8), F32, variant.device)
    mask = torch.zeros(5, dtype=torch.uint8, device=variant.device)
    arguments = (case.dy, case.x, case.mean, case.inv_std, None, True)
    with pytest.raises(ValueError, match="must hold 6 bytes"):
        reduce(*arguments, mask)
    with pytest.raises(TypeError, match="must be uint8"):
        reduce(*arguments, mask.int())
    x = torch.ones(2, 4, 6, device=variant.device, dtype=F32)
    with pytest.raises(ValueError, match="3 dimensions"):
        reduce(x, x, case.mean[:4], case.inv_std[:4], None, False, mask)


def test_traced():
    for layout, shape in [("first", (2, 3, 5)), ("last", (4, 8)), ("memory", (2, 8, 3, 3))]:
        case = Case(layout, shape, F32, "cpu")
        for weight in (case.weight, None):
            torch.library.opcheck(
                reduce.default, (case.dy, case.x, case.mean, case.inv_std, weight, case.last)
            )
