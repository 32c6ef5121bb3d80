"""welford_mean_var against float64, on everything that can serve it."""

from __future__ import annotations

import channels
import lists
import pytest
import torch
from channels import EVERY, Case, near
from lists import BF16, F16, F32, F64

from apex._loader import bindings

bindings.load()


def statistics(case):
    found = torch.ops.apex.welford_mean_var(case.x, case.last)
    assert found.shape == (2 * case.channels + 1,) and found.dtype == lists.math_dtype(case.x.dtype)
    return found[: case.channels], found[case.channels : -1], found[-1].item()


def check(case, loose=1.0):
    mean, var, count = statistics(case)
    assert count == case.count
    if case.count:
        near(mean, case.x64.mean(case.over), loose=loose)
        near(var, case.var64, loose=loose)
    else:
        assert mean.eq(0).all() and var.eq(0).all()
    return mean, var


@pytest.mark.parametrize("dtype", channels.DTYPES, ids=str)
def test_values(variant, dtype):
    for layout, shape in EVERY:
        check(Case(layout, shape, dtype, variant.device))
    if variant.simt:
        assert {name.rsplit("_", 1)[0] for name in variant.kernels} == {
            f"welford_mean_var_{kind}" for kind in ("first", "last", "last1")
        }


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_layouts(variant, dtype):
    """Views between two vectors, transposed and sliced inputs."""
    for layout, shape in [("first", (3, 4, 8, 8)), ("first", (2, 3, 77)), ("last", (7, 5, 16))]:
        case = Case(layout, shape, dtype, variant.device)
        case.x = lists.misaligned([case.x])[0]
        check(case)
    case = Case("first", (4, 6, 5, 7), dtype, variant.device)
    case.x, case.x64 = case.x.transpose(2, 3), case.x64.transpose(2, 3)
    check(case)
    sliced = channels.laid_out("memory", (4, 16, 6, 7), dtype, variant.device)
    case.x, case.x64 = sliced[:, :6, ::2], sliced[:, :6, ::2].cpu().double()
    case.var64, case.count = case.x64.var(case.over, unbiased=False), 4 * 3 * 7
    check(case)


@pytest.mark.parametrize(
    "layout, shape", [("first", (4, 3, 50, 52)), ("last", (9000, 8)), ("last", (700, 3))]
)
def test_large_mean(variant, layout, shape):
    """Mean 1e4, deviation 2: nothing of the variance is lost, and the mean is right to its last digits."""
    case = Case(layout, shape, F32, variant.device, mean=1e4)
    mean, var, _ = statistics(case)
    torch.testing.assert_close(mean.cpu().double(), case.x64.mean(case.over), rtol=2.0**-22, atol=0)
    torch.testing.assert_close(var.cpu().double(), case.var64, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "layout, shape", [("first", (3, 4, 700)), ("first", (40, 4, 49)), ("last", (2100, 4))]
)
def test_outliers(variant, layout, shape):
    """A first element far from all others, equal elements, and halves that are."""
    case = Case(layout, shape, F32, variant.device)
    for tensor in (case.x, case.x64):
        channels_first = tensor if layout == "first" else tensor[..., None]
        channels_first[0, 0, 0] = 1e4
        channels_first[:, 1] = 3.25
        channels_first[::2, 2] = 0
    case.var64 = case.x64.var(case.over, unbiased=False)
    mean, var, _ = statistics(case)
    torch.testing.assert_close(var.cpu().double(), case.var64, rtol=1e-4, atol=1e-6)
    deviations = case.var64.sqrt().clamp_min(1)
    torch.testing.assert_close(
        mean.cpu().double() / deviations, case.x64.mean(case.over) / deviations, rtol=1e-5, atol=1e-5
    )
    assert mean[1] == 3.25 and var[1] == 0


def test_not_finite(variant):
    """inf and nan stay in their channel."""
    case = Case("first", (3, 4, 50), F32, variant.device)
    case.x[1, 1, 3], case.x[2, 2, 7] = float("inf"), float("nan")
    mean, var, _ = statistics(case)
    assert not mean[1].isfinite() and mean[2].isnan() and var[1:3].isnan().all()
    assert mean[[0, 3]].isfinite().all() and var[[0, 3]].isfinite().all()


@pytest.mark.parametrize("layout, shape", [("first", (130, 2, 88)), ("last", (1100, 8))])
def test_same_bits(variant, layout, shape):
    """From run to run, also right after a launch of another size."""
    case = Case(layout, shape, BF16, variant.device)
    first = torch.ops.apex.welford_mean_var(case.x, case.last)
    torch.ops.apex.welford_mean_var(Case("last", (3000, 40), F32, variant.device).x, True)
    lists.assert_same_bits([torch.ops.apex.welford_mean_var(case.x, case.last)], [first])


def test_refused(variant):
    op = torch.ops.apex.welford_mean_var
    with pytest.raises(ValueError, match="1 dimensions"):
        op(torch.zeros(3, device=variant.device, dtype=F32))
    with pytest.raises(TypeError, match="float32, float16, bfloat16 and float64"):
        op(torch.zeros(3, 4, dtype=torch.int32, device=variant.device))


def test_traced():
    """What torch asks of an op that its tracers meet."""
    for layout, shape in [("first", (2, 3, 5)), ("last", (4, 8)), ("memory", (2, 8, 3, 3))]:
        case = Case(layout, shape, F64 if layout == "last" else F32, "cpu")
        torch.library.opcheck(torch.ops.apex.welford_mean_var.default, (case.x, case.last))
