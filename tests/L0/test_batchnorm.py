"""batchnorm_forward and batchnorm_backward against float64, on everything that can serve them."""

from __future__ import annotations

import channels
import lists
import pytest
import torch
from channels import EVERY, SOME, Case, near
from lists import BF16, F16, F32, F64

from apex._loader import bindings

bindings.load()
forward, backward = torch.ops.apex.batchnorm_forward, torch.ops.apex.batchnorm_backward


def check_forward(case, z=True, relu=True):
    y = forward(
        case.x, case.z if z else None, case.mean, case.inv_std, case.weight, case.shift, relu, case.last
    )
    assert y.dtype == case.x.dtype and y.shape == case.x.shape
    near(y, case.forward(z, relu))
    return y


def check_backward(case):
    """With sums as float64 has them, and without any (eval mode)."""
    centred = case.x64 - case.spread(case.mean64)
    sums64 = [case.dy64.sum(case.over), (case.dy64 * centred).sum(case.over)]
    sums = [t.to(case.mean.dtype).to(case.x.device) for t in sums64]
    counts = torch.tensor([case.count, 3, 0], dtype=torch.int32, device=case.x.device)
    scale = case.inv_std64 if case.weight is None else case.inv_std64 * case.weight64
    n = case.count + 3
    along = sums64[1] / n * case.inv_std64.square()
    expected = case.dy64 - case.spread(sums64[0] / n) - centred * case.spread(along)
    arguments = (case.dy, case.x, case.mean, case.inv_std, case.weight)
    dx = backward(*arguments, *sums, counts, case.last)
    assert (
        dx.dtype == case.x.dtype
        and dx.stride() == forward(case.x, None, *arguments[2:4], channel_last=case.last).stride()
    )
    near(dx, expected * case.spread(scale))
    as_float = torch.tensor([float(n)], dtype=case.mean.dtype, device=case.x.device)
    assert torch.equal(backward(*arguments, *sums, as_float, case.last), dx)
    near(backward(*arguments, None, None, None, case.last), case.dy64 * case.spread(scale))
    return dx


@pytest.mark.parametrize("dtype", channels.DTYPES, ids=str)
def test_values(variant, dtype):
    for layout, shape in EVERY:
        case = Case(layout, shape, dtype, variant.device)
        check_forward(case)
        check_backward(case)
    if variant.simt:
        assert {name.rsplit("_", 1)[0] for name in variant.kernels} == {
            f"batchnorm_{way}_{kind}" for way in ("forward", "backward") for kind in ("any", "last")
        }


@pytest.mark.parametrize("dtype, weight", [(F16, F32), (BF16, F32), (F32, F16), (F16, BF16)], ids=str)
def test_mixed_dtypes(variant, dtype, weight):
    for layout, shape in SOME:
        case = Case(layout, shape, dtype, variant.device, weight_dtype=weight)
        check_forward(case, z=False)
        check_backward(case)


@pytest.mark.parametrize("z", [False, True], ids=["", "z"])
@pytest.mark.parametrize("relu", [False, True], ids=["", "relu"])
@pytest.mark.parametrize("affine", [False, True], ids=["", "affine"])
def test_parts(variant, z, relu, affine):
    for layout, shape in SOME:
        case = Case(layout, shape, F32, variant.device, affine=affine)
        y = check_forward(case, z, relu)
        assert not relu or (y >= 0).all()
        check_backward(case)


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_layouts(variant, dtype):
    """Outputs keep the input's memory format; other tensors may have any; views between two vectors."""
    for layout, shape in [("first", (3, 4, 8, 8)), ("memory", (3, 16, 4, 5)), ("last", (7, 5, 16))]:
        case = Case(layout, shape, dtype, variant.device)
        assert check_forward(case).stride() == case.x.stride()
        if case.x.dim() == 4:
            case.dy = case.dy.transpose(2, 3).contiguous().transpose(2, 3)
            case.z = case.z.contiguous(memory_format=torch.channels_last)
        check_forward(case)
        check_backward(case)
        case.x, case.z = (lists.misaligned([t.contiguous()])[0] for t in (case.x, case.z))
        check_forward(case)
        check_backward(case)


def test_large_mean(variant):
    """Mean 1e4: the difference to the mean comes first, so the output keeps its digits."""
    case = Case("first", (4, 3, 50), F32, variant.device, mean=1e4)
    near(forward(case.x, None, case.mean, case.inv_std, case.weight, case.shift), case.forward(False, False))


def test_not_finite(variant):
    """inf and nan stay where they are, also through the ReLU."""
    case = Case("first", (3, 4, 50), F32, variant.device)
    case.x[1, 1, 3], case.x[2, 2, 7] = float("inf"), float("nan")
    y = forward(case.x, None, case.mean, case.inv_std, case.weight.abs(), case.shift, True)
    assert y[2, 2, 7].isnan() and y[1, 1, 3] == float("inf") and (~y.isfinite()).sum() == 2


@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(mean=torch.ones(3, dtype=F32, device="cpu")), ValueError, r"has shape .*, not .*\[4\]"),
        (dict(mean=torch.ones(4, dtype=F32, device="cpu").half()), TypeError, "has dtype Half, not Float"),
        (dict(weight=torch.ones(5, dtype=F32, device="cpu")), ValueError, r"has shape .*, not .*\[4\]"),
        (
            dict(weight=torch.ones(4, dtype=F32, device="cpu").double()),
            TypeError,
            "float64 goes with float64",
        ),
        (
            dict(
                weight=torch.ones(4, dtype=F32, device="cpu"),
                shift=torch.ones(4, dtype=F32, device="cpu").half(),
            ),
            TypeError,
            "one dtype",
        ),
        (dict(z=torch.ones(2, 4, 3, dtype=F32, device="cpu")), ValueError, "not the input's"),
        (dict(z=torch.ones(2, 4, 6, dtype=F32, device="cpu").half()), TypeError, "not the input's"),
        (dict(input=torch.ones(4, dtype=F32, device="cpu")), ValueError, "1 dimensions"),
    ],
    ids=lambda p: "-".join(p) if isinstance(p, dict) else "",
)
def test_refused(variant, change, error, words):
    given = (
        dict(
            input=torch.ones(2, 4, 6, dtype=F32, device="cpu"),
            z=None,
            mean=torch.ones(4, dtype=F32, device="cpu"),
            inv_std=torch.ones(4, dtype=F32, device="cpu"),
        )
        | change
    )
    given = {k: v if v is None else v.to(variant.device) for k, v in given.items()}
    with pytest.raises(error, match=words):
        forward(**given)


def test_backward_refused(variant):
    case = Case("first", (2, 4, 6), F32, variant.device)
    arguments = (case.dy, case.x, case.mean, case.inv_std, case.weight)
    with pytest.raises(ValueError, match="come together"):
        backward(*arguments, case.mean, case.mean)
    with pytest.raises(ValueError, match="not the input's"):
        backward(case.dy[:1], *arguments[1:])
    for i, name in enumerate(("grad_output", "input", "mean", "inv_std")):
        if name != "input":  # torch's own error
            with pytest.raises(TypeError, match=f"{name} must be a tensor, not None"):
                backward(*arguments[:i], None, *arguments[i + 1 :])


def test_traced():
    for layout, shape in [("first", (2, 3, 5)), ("last", (4, 8)), ("memory", (2, 8, 3, 3))]:
        case = Case(layout, shape, F32, "cpu")
        rest = (case.mean, case.inv_std, case.weight)
        torch.library.opcheck(forward.default, (case.x, case.z, *rest, case.shift, True, case.last))
        torch.library.opcheck(backward.default, (case.dy, case.x, *rest, None, None, None, case.last))


def test_float64_goes_alone(variant):
    case = Case("first", (2, 4, 6), F64, variant.device)
    with pytest.raises(TypeError, match="float64 goes with float64"):
        forward(case.x, None, case.mean, case.inv_std, case.weight.float(), case.shift.float())
