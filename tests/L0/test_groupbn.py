"""groupbn_forward and groupbn_backward against float64, on everything that can serve them."""

from __future__ import annotations

import channels
import lists
import pytest
import torch
from channels import Case, near
from lists import BF16, F16, F32, F64

from apex._loader import bindings

bindings.load()
forward, backward = torch.ops.apex.groupbn_forward, torch.ops.apex.groupbn_backward

# "memory": [N, C, H, W] in torch.channels_last; "last": NHWC. Channels that are whole bytes of a mask, and others.
SHAPES = [
    ("memory", (3, 16, 4, 5)),
    ("memory", (2, 5, 3, 7)),
    ("last", (2, 3, 5, 24)),
    ("last", (70, 8)),
    ("last", (5, 136)),
    ("last", (6, 131)),
    ("last", (3, 3, 12)),
    ("last", (0, 4, 8)),
    ("last", (9, 1)),
]


def in_memory(case, tensor):
    """Flattened in the order of NHWC memory."""
    return (tensor if case.last or tensor.dim() == 2 else tensor.movedim(1, -1)).flatten()


def bits_of(case, bitmask):
    """The mask as a bool for each element, in the order of memory; bits past the last one must be 0."""
    bits = (
        (bitmask.cpu().unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device="cpu") & 1).flatten().bool()
    )
    assert bitmask.numel() == (case.x.numel() + 7) // 8 and not bits[case.x.numel() :].any()
    return bits[: case.x.numel()]


def check_forward(case, z=True, relu=True, mask=True):
    y, bitmask = forward(
        case.x, case.z if z else None, case.mean, case.inv_std, case.weight, case.shift, relu, mask, case.last
    )
    assert y.dtype == case.x.dtype and y.shape == case.x.shape
    format = torch.contiguous_format if case.last else torch.channels_last
    assert y.is_contiguous(memory_format=format)
    near(y, case.forward(z, relu))
    if not mask:
        assert bitmask.numel() == 0
        return y, bitmask
    before = in_memory(case, case.forward(z, False))
    sure = before.abs() > 1e-5  # where rounding may decide the sign, either is right
    assert torch.equal(bits_of(case, bitmask)[sure], (before > 0)[sure])
    return y, bitmask


def check_backward(case, bitmask, of_z=True):
    """With sums as float64 has them, and without any (eval mode)."""
    dy64 = case.dy64
    if bitmask is not None:
        kept = bits_of(case, bitmask)
        kept = kept.view(in_memory_shape(case))
        kept = kept if case.last or kept.dim() == 2 else kept.movedim(-1, 1)
        dy64 = torch.where(kept, dy64, 0)
    centred = case.x64 - case.spread(case.mean64)
    sums64 = [dy64.sum(case.over), (dy64 * centred).sum(case.over)]
    sums = [t.to(case.mean.dtype).to(case.x.device) for t in sums64]
    counts = torch.tensor([case.count, 3, 0], dtype=torch.int32, device=case.x.device)
    scale = case.inv_std64 if case.weight is None else case.inv_std64 * case.weight64
    n = case.count + 3
    along = sums64[1] / n * case.inv_std64.square()
    expected = dy64 - case.spread(sums64[0] / n) - centred * case.spread(along)
    arguments = (case.dy, case.x, bitmask, case.mean, case.inv_std, case.weight)
    dx, dz = backward(*arguments, *sums, counts, of_z, case.last)
    assert dx.dtype == case.x.dtype and dx.shape == case.x.shape
    near(dx, expected * case.spread(scale))
    if of_z:
        assert torch.equal(dz.cpu().double(), dy64) and dz.stride() == dx.stride()
    else:
        assert dz.numel() == 0
    near(backward(*arguments, None, None, None, False, case.last)[0], dy64 * case.spread(scale))


def in_memory_shape(case):
    shape = list(case.x.shape)
    return shape if case.last or len(shape) == 2 else [shape[0], *shape[2:], shape[1]]


@pytest.mark.parametrize("dtype", channels.DTYPES, ids=str)
def test_values(variant, dtype):
    for layout, shape in SHAPES:
        case = Case(layout, shape, dtype, variant.device, weight_dtype=F64 if dtype == F64 else F32)
        y, bitmask = check_forward(case)
        check_backward(case, bitmask)
    if variant.simt:
        assert {name.rsplit("_", 1)[0] for name in variant.kernels} == {
            f"groupbn_{way}_{kind}" for way in ("forward", "backward") for kind in ("any", "last")
        }


@pytest.mark.parametrize("z", [False, True], ids=["", "z"])
@pytest.mark.parametrize("relu", [False, True], ids=["", "relu"])
@pytest.mark.parametrize("affine", [False, True], ids=["", "affine"])
def test_parts(variant, z, relu, affine):
    for layout, shape in SHAPES[:3]:
        case = Case(layout, shape, F32, variant.device, affine=affine)
        check_forward(case, z, relu, mask=False)
        _, bitmask = check_forward(case, z, relu, mask=relu)
        check_backward(case, bitmask if relu else None, of_z=z)


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_layouts(variant, dtype):
    """Other memory formats are brought into NHWC; views between two vectors."""
    case = Case("memory", (3, 16, 4, 5), dtype, variant.device, weight_dtype=F32)
    y, bitmask = check_forward(case)
    for name in ("x", "dy", "z"):
        kept = getattr(case, name)
        setattr(case, name, kept.contiguous())
        again, same_bits = check_forward(case)
        assert torch.equal(again, y) and torch.equal(same_bits, bitmask)
        check_backward(case, bitmask)
        setattr(case, name, kept)
    case = Case("last", (7, 5, 16), dtype, variant.device, weight_dtype=F32)
    y, bitmask = check_forward(case)
    case.x, case.z = (lists.misaligned([t])[0] for t in (case.x, case.z))
    again, same_bits = check_forward(case)
    assert torch.equal(again, y) and torch.equal(same_bits, bitmask)
    check_backward(case, bitmask)


def test_same_bits_from_run_to_run(variant):
    case = Case("last", (70, 8), F16, variant.device, weight_dtype=F32)
    first, second = (check_forward(case) for _ in range(2))
    lists.assert_same_bits(first, second)


def test_not_finite(variant):
    """inf and nan stay where they are; a nan passes the ReLU, and so does its gradient, as in torch."""
    case = Case("last", (6, 8), F32, variant.device)
    case.x[1, 1], case.x[2, 2], case.dy[3, 3] = float("inf"), float("nan"), float("inf")
    case.z[3, 3] = -1e3
    y, bitmask = forward(
        case.x, case.z, case.mean, case.inv_std, case.weight.abs(), case.shift, True, True, True
    )
    assert y[2, 2].isnan() and y[1, 1] == float("inf") and (~y.isfinite()).sum() == 2
    bits = bits_of(case, bitmask).view(6, 8)
    assert bits[2, 2] and bits[1, 1] and not bits[3, 3]
    dx, dz = backward(
        case.dy, case.x, bitmask, case.mean, case.inv_std, case.weight, of_z=True, channel_last=True
    )
    assert dz[3, 3] == 0 and dx[3, 3] == 0


@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(mean=torch.ones(3, dtype=F32, device="cpu")), ValueError, r"has shape .*, not .*\[4\]"),
        (dict(inv_std=torch.ones(4, dtype=F32, device="cpu").half()), TypeError, "has dtype Half, not Float"),
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
        (dict(z=torch.ones(2, 4, 3, 1, dtype=F32, device="cpu")), ValueError, "not the input's"),
        (dict(z=torch.ones(2, 4, 3, 3, dtype=F32, device="cpu").half()), TypeError, "not the input's"),
        (dict(input=torch.ones(2, 4, 6, dtype=F32, device="cpu")), ValueError, "3 dimensions"),
        (dict(input=torch.ones(2, 4, 3, 3, dtype=F32, device="cpu").int()), TypeError, "takes float32"),
        (dict(make_bitmask=True), ValueError, "make_bitmask needs fuse_relu"),
    ],
    ids=lambda p: "-".join(p) if isinstance(p, dict) else "",
)
def test_refused(variant, change, error, words):
    given = (
        dict(
            input=torch.ones(2, 4, 3, 3, dtype=F32, device="cpu"),
            z=None,
            mean=torch.ones(4, dtype=F32, device="cpu"),
            inv_std=torch.ones(4, dtype=F32, device="cpu"),
        )
        | change
    )
    given = {k: v.to(variant.device) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    with pytest.raises(error, match=words):
        forward(**given)


def test_backward_refused(variant):
    case = Case("last", (6, 8), F32, variant.device)
    rest = (case.mean, case.inv_std)
    mask = torch.zeros(6, dtype=torch.uint8, device=variant.device)
    with pytest.raises(ValueError, match="come together"):
        backward(case.dy, case.x, mask, *rest, None, case.mean, case.mean, channel_last=True)
    with pytest.raises(ValueError, match="must hold 6 bytes"):
        backward(case.dy, case.x, mask[1:], *rest, channel_last=True)
    with pytest.raises(TypeError, match="must be uint8"):
        backward(case.dy, case.x, mask.int(), *rest, channel_last=True)
    with pytest.raises(ValueError, match="not the input's"):
        backward(case.dy[1:], case.x, mask, *rest, channel_last=True)
    with pytest.raises(TypeError, match="grad_output must be a tensor, not None"):
        backward(None, case.x, mask, *rest, channel_last=True)


def test_traced():
    for layout, shape in [("last", (4, 8)), ("memory", (2, 8, 3, 3))]:
        case = Case(layout, shape, F32, "cpu")
        rest = (case.mean, case.inv_std, case.weight)
        torch.library.opcheck(forward.default, (case.x, case.z, *rest, case.shift, True, True, case.last))
        _, mask = check_forward(case)
        torch.library.opcheck(
            backward.default, (case.dy, case.x, mask, *rest, None, None, None, True, case.last)
        )


def test_mixed_dtypes(variant):
    for dtype, weight in [(F16, F32), (BF16, F32), (F32, F16), (F16, BF16)]:
        case = Case("memory", (2, 8, 3, 5), dtype, variant.device, weight_dtype=weight)
        check_backward(case, check_forward(case)[1])
