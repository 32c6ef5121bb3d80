"""The group norm ops against float64, on everything that can serve them."""

from __future__ import annotations

import lists
import pytest
import torch
import torch.nn.functional as F
from lists import BF16, F16, F32, F64
from norms import leaf

from apex._loader import bindings

bindings.load()
EPS = 1e-3
DTYPES = [F32, F16, BF16, F64]
# (shape, groups): no image; no pixel; no channel; single elements; odd; groups that share a vector; one group; a group
# of several strips; an image that one block keeps and one that it cannot; public apex's own; one and three dimensions
# of space.
SHAPES = [
    ((0, 8, 3, 3), 2),
    ((2, 8, 0, 3), 2),
    ((2, 0, 3, 3), 1),
    ((2, 6), 3),
    ((2, 3, 5, 7), 3),
    ((2, 40, 5, 6), 4),
    ((3, 16, 3, 4), 1),
    ((1, 640, 2, 2), 1),
    ((1, 40, 40, 30), 4),
    ((1, 128, 4, 4), 32),
    ((2, 24, 11), 6),
    ((1, 16, 2, 3, 4), 2),
]
FEW = [((2, 3, 5, 7), 3), ((1, 40, 5, 6), 4)]


def channels_last(x):
    """The same values, laid out so that a pixel's channels lie side by side."""
    if x.dim() == 3:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return x.contiguous(memory_format={4: torch.channels_last, 5: torch.channels_last_3d}[x.dim()])


def make(shape, dtype, device, last=True, weight=None, seed=1):
    """(input, weight, bias), requiring gradients; weights of another dtype if asked for, none if False."""
    x, w, b = lists.random(F64, "cpu", (shape, shape[1:2], shape[1:2]), seed=seed)
    x = (x + 1).to(dtype).to(device)
    x = channels_last(x) if last and 3 <= x.dim() <= 5 else x
    x.requires_grad_()
    if weight is False:
        return x, None, None
    return x, *((t + k).to(weight or dtype).to(device).requires_grad_() for t, k in ((w, 1), (b, 0)))


def run(x, groups, weight, bias, silu=False, eps=EPS):
    """The output alone."""
    return torch.ops.apex.group_norm_forward(x, groups, weight, bias, eps, silu)[0]


def exact(x, groups, weight, bias, silu=False, eps=EPS):
    """In float64, differentiable, from torch's elementary ops."""
    y = x.reshape(x.shape[0], groups, x.shape[1] // groups * x.shape[2:].numel())
    y = y - y.mean(2, keepdim=True)
    y = (y * torch.rsqrt(y.square().mean(2, keepdim=True) + eps)).reshape(x.shape)
    shape = (1, -1, *[1] * (x.dim() - 2))
    y = y if weight is None else y * weight.reshape(shape) + bias.reshape(shape)
    return F.silu(y) if silu else y


def near(found, expected, *dtypes):
    """Within a rounding of the tensor's dtype, and some of the arithmetic, relative to the largest value."""
    expected = expected.detach()
    if not expected.numel():
        return
    own, work = lists.ROUNDING[found.dtype], lists.ROUNDING[lists.math_dtype(found.dtype, *dtypes)]
    scale = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(
        found.detach().cpu().double(), expected, rtol=1.01 * own + 8 * work, atol=64 * scale * work
    )


def check(x, groups, weight, bias, silu=False, gradient=None):
    """Forward and backward against float64; returns (output, gradients)."""
    y = run(x, groups, weight, bias, silu)
    assert y.dtype == x.dtype and y.shape == x.shape
    is_last = 3 <= x.dim() <= 5 and x.stride() == channels_last(x.detach()).stride()
    if x.numel():
        assert y.stride() == x.stride() if is_last else y.is_contiguous()
    dy = lists.random(y.dtype, y.device, (tuple(y.shape),), seed=3)[0] if gradient is None else gradient
    leaves = [t for t in (x, weight, bias) if t is not None]
    found = torch.autograd.grad(y, leaves, dy)
    wide = [leaf(t) for t in leaves]
    expected = exact(wide[0], groups, *(wide[1:] or (None, None)), silu)
    wanted = torch.autograd.grad(expected, wide, dy.detach().cpu().double())
    near(y, expected, x.dtype)
    for tensor, like, value in zip(found, leaves, wanted, strict=True):
        assert tensor.shape == value.shape and tensor.dtype == like.dtype
        near(tensor, value, x.dtype)
    return y.detach(), found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_values(variant, dtype, last):
    for number, (shape, groups) in enumerate(SHAPES):
        check(*_with_groups(make(shape, dtype, variant.device, last), groups), silu=number % 2 == 0)
    for shape, groups in FEW:
        for silu in (False, True):
            check(*_with_groups(make(shape, dtype, variant.device, last, seed=4), groups), silu=silu)


def _with_groups(tensors, groups):
    return tensors[0], groups, *tensors[1:]


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_weights_of_any_dtype_or_none(variant, dtype):
    """All nine pairs of public apex, and no weights, which it takes torch for."""
    for shape, groups in FEW:
        for weight in (F32, F16, BF16, False):
            check(*_with_groups(make(shape, dtype, variant.device, weight=weight), groups), silu=True)


def test_kernels_of_every_kind(variant):
    """One launch where a block keeps the image and vectors are of two groups at most, two where not; channels first."""
    if not variant.simt:
        pytest.skip("counts launches on the executor")
    for shape, last, kernels in (
        ((1, 32, 3, 4), True, {"forward_tile_bf16", "backward_tile_bf16"}),
        (
            (257, 32, 1, 1),
            True,
            {"forward_tile_bf16", "backward_tile_bf16", "finish"},
        ),  # images past one block's
        ((1, 16, 3, 4), True, {f"{k}_last_bf16" for k in ("statistics", "apply", "sums", "gradient")}),
        ((1, 40, 40, 30), True, {f"{k}_last_bf16" for k in ("statistics", "apply", "sums", "gradient")}),
        ((1, 16, 4, 4), False, {f"{k}_first_bf16" for k in ("statistics", "apply", "sums", "gradient")}),
        ((1, 4, 3, 3), True, {f"{k}_last_any1" for k in ("statistics", "apply", "sums", "gradient")}),
    ):
        variant.kernels.clear()
        check(*_with_groups(make(shape, BF16, variant.device, last), 4))
        assert set(variant.kernels) == {f"group_norm_{k}" for k in kernels}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_any_strides(variant, dtype):
    """Slices, transposed and expanded inputs, gradients in another layout, views that begin off 16 bytes."""
    for shape, groups in FEW:
        x, w, b = (t.detach() for t in make(shape, dtype, variant.device))
        wide = torch.cat((x, x), 3)[:, :, :, : shape[3]]
        for view in (wide, x.transpose(2, 3), x[:, :, :1].expand(x.shape), *lists.misaligned([x])):
            check(
                *_with_groups((view.requires_grad_(), w.requires_grad_(), b.requires_grad_()), groups),
                silu=True,
            )
        x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
        dy = lists.random(dtype, variant.device, (shape,), seed=3)[0]
        check(x, groups, w, b, gradient=dy)
        check(x, groups, w, b, gradient=dy[:, :, :1].expand(shape))


def test_large_means_keep_their_digits(variant):
    """Mean 4096, standard deviation 1: as the same values without the mean."""
    for last in (False, True):
        for shape, groups in [*FEW, ((1, 40, 40, 30), 4)]:
            x, w, b = (t.detach() for t in make(shape, F32, variant.device, last))
            shifted = (x * 64).round() / 64 + 4096  # exact in float32
            a, c = run(shifted, groups, w, b), run(shifted - 4096, groups, w, b)
            torch.testing.assert_close(a, c, rtol=1e-4, atol=2e-3)


def test_first_elements_far_from_the_rest(variant):
    """What differences are taken from may be an outlier."""
    for last in (False, True):
        x, w, b = make((2, 16, 9, 9), F32, variant.device, last)
        with torch.no_grad():
            x[:, ::4, 0, 0] = 1000
        check(x, 4, w, b)


def test_constant_groups(variant):
    """Variance 0: the output is the bias."""
    for last in (False, True):
        x, w, b = make((2, 8, 3, 3), F32, variant.device, last)
        with torch.no_grad():
            x.fill_(3)
        y = run(x, 2, w, b)
        torch.testing.assert_close(y.detach(), b.detach().reshape(1, -1, 1, 1).expand(y.shape))


def test_groups_that_hardly_vary(variant):
    """Groups of one value, however large it is; and a mean that rounds does not widen the deviation."""
    on_cpu = variant.wanted == "cpu"  # sums of others overflow, and theirs round
    for last in (False, True):
        for channels, side in ((2, 1), (2, 3), (32, 1), (48, 5), (600, 2)):
            x = make((1, channels, side, side), F32, variant.device, last)[0].detach()
            assert run(x.fill_(1e38 if on_cpu else 3e3), 2, None, None).eq(0).all()
        x = make((1, 2, 2, 1), F32, variant.device, last)[0].detach()
        x.copy_(torch.tensor([1.0, 4.0, 2.0, 5.0], dtype=F32, device="cpu").reshape(x.shape) / 16)
        x += 1e6 if on_cpu else 0
        found, expected = run(x, 2, None, None).double().cpu(), exact(x.double().cpu(), 2, None, None)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_special_values_stay_in_their_groups(variant):
    for last in (False, True):
        for shape in ((2, 8, 3, 3), (1, 40, 40, 30)):
            x, w, b = make(shape, F32, variant.device, last)
            with torch.no_grad():
                x[0, 0, 0, 0] = float("nan")
                x[0, -1, -1, -1] = float("inf")
            for silu in (False, True):
                y = run(x, 4, w, b, silu).detach()
                of_group = y.reshape(shape[0] * 4, -1)
                clean = torch.ones(shape[0] * 4, dtype=torch.bool, device=y.device)
                clean[0] = clean[3] = False
                assert of_group[clean].isfinite().all() and of_group[~clean].isnan().any(-1).all()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_far_negative_and_positive_inputs_of_silu(variant, dtype):
    x, w, b = make((1, 8, 4, 4), dtype, variant.device)
    with torch.no_grad():
        w.mul_(200)
    y, (dx, *_) = check(x, 2, w, b, silu=True)
    assert y.isfinite().all() and dx.isfinite().all()


def test_same_bits(variant):
    for last in (False, True):
        for shape in ((2, 40, 5, 6), (1, 40, 40, 30)):
            tensors = _with_groups(make(shape, BF16, variant.device, last), 4)
            (a, b), (c, d) = check(*tensors, silu=True), check(*tensors, silu=True)
            lists.assert_same_bits([a, *b], [c, *d])


def test_no_weight_gradients_where_none_is_wanted(variant):
    for last in (False, True):
        for shape in ((2, 40, 5, 6), (1, 40, 40, 30)):
            x, w, b = make(shape, F32, variant.device, last)
            (all_of_them, *_) = torch.autograd.grad(run(x, 4, w, b, True).square().sum(), (x, w, b))
            (alone,) = torch.autograd.grad(run(x, 4, w.detach(), b.detach(), True).square().sum(), x)
            lists.assert_same_bits([alone], [all_of_them])
    mean, rstd = (
        torch.zeros(1, 4, device=variant.device, dtype=F32),
        torch.ones(1, 4, device=variant.device, dtype=F32),
    )
    found = torch.ops.apex.group_norm_backward(x.detach(), x.detach(), mean, rstd, 4, w, b, EPS, False, False)
    assert found[1].numel() == found[2].numel() == 0


def test_no_worse_than_torch(variant):
    """The error against float64, in the same dtype, of the output and of every gradient."""
    for dtype in (F32, BF16):
        for last in (False, True):
            for shape, groups in (((2, 40, 5, 6), 4), ((1, 40, 40, 30), 4)):
                tensors = make(shape, dtype, variant.device, last)
                wide = [leaf(t) for t in tensors]
                dy = lists.random(dtype, variant.device, (shape,), seed=3)[0]
                expected = F.silu(F.group_norm(wide[0], groups, *wide[1:], EPS))
                wanted = [expected, *torch.autograd.grad(expected, wide, dy.cpu().double())]

                def errors(y, tensors=tensors, dy=dy, wanted=wanted):
                    found = [y, *torch.autograd.grad(y, tensors, dy)]
                    return [
                        (a.detach().cpu().double() - b).square().mean().sqrt()
                        for a, b in zip(found, wanted, strict=True)
                    ]

                theirs = errors(F.silu(F.group_norm(tensors[0], groups, *tensors[1:], EPS)))
                ours = errors(run(tensors[0], groups, *tensors[1:], True))
                for a, b in zip(ours, theirs, strict=True):
                    assert a <= 1.1 * b + 2e-8 * max(1, wanted[2].abs().max()), (dtype, shape, ours, theirs)


@pytest.mark.parametrize(
    "change, error, text",
    [
        (lambda x, g, w, b: (x.long(), g, w, b), TypeError, "not"),
        (lambda x, g, w, b: (x[0, 0, 0], g, w, b), ValueError, "at least 2, batch and channels"),
        (lambda x, g, w, b: (x, 0, w, b), ValueError, "num_groups must be at least 1, not 0"),
        (lambda x, g, w, b: (x, -4, w, b), ValueError, "num_groups must be at least 1"),
        (lambda x, g, w, b: (x, 3, w, b), ValueError, "8 channels cannot be parted into 3 groups"),
        (
            lambda x, g, w, b: (x, g, w[:4], b),
            ValueError,
            r"weight has shape .* a number each channel, \[8\]",
        ),
        (
            lambda x, g, w, b: (x, g, w, b.reshape(2, 4)),
            ValueError,
            r"bias has shape .* a number each channel, \[8\]",
        ),
        (lambda x, g, w, b: (x, g, w.half(), b), TypeError, "one dtype"),
        (lambda x, g, w, b: (x, g, w.double(), b.double()), TypeError, "float64 goes with float64 alone"),
        (lambda x, g, w, b: (x, g, w.to("meta"), b), ValueError, "weight is on meta"),
    ],
)
def test_bad_arguments(variant, change, error, text):
    x, w, b = (t.detach() for t in make((2, 8, 3, 3), F32, variant.device))
    with pytest.raises(error, match=text):
        run(*change(x, 4, w, b))


@pytest.mark.parametrize(
    "change, error, text",
    [
        (dict(grad_output=lambda t: t[:1]), ValueError, "the gradient has shape"),
        (dict(grad_output=lambda t: t.half()), TypeError, "the gradient has dtype Half, not Float"),
        (dict(mean=lambda t: t[:1]), ValueError, "mean has shape .* one for each image and group"),
        (dict(rstd=lambda t: t.half()), TypeError, "rstd has dtype Half, not"),
    ],
)
def test_bad_arguments_of_the_backward(variant, change, error, text):
    x, w, b = (t.detach() for t in make((2, 8, 3, 3), F32, variant.device))
    _, mean, rstd = torch.ops.apex.group_norm_forward(x, 4, w, b, EPS)
    named = dict(grad_output=x, input=x, mean=mean, rstd=rstd, num_groups=4, weight=w, bias=b, eps=EPS)
    for name, function in change.items():
        named[name] = function(named[name])
    with pytest.raises(error, match=text):
        torch.ops.apex.group_norm_backward(**named)


@pytest.mark.gpu
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_more_than_two_to_the_31_elements(last):
    """Images on both sides of the border, forward and backward, equal to torch's on their own."""
    if torch.cuda.mem_get_info()[0] < 30 << 30:
        pytest.skip("needs 30 GiB of GPU memory")
    shape = (9, 64, 2048, 2048)  # 2.4e9
    x = torch.empty(shape, device="cuda", dtype=BF16)
    x = x.to(memory_format=torch.channels_last) if last else x
    x.normal_().requires_grad_()
    w, b = (torch.ones(64, device="cuda", requires_grad=True, dtype=F32) for _ in range(2))
    y = run(x, 32, w, b, True)
    dy = torch.empty_like(y).normal_()
    dx, dw, _ = torch.autograd.grad(y, (x, w, b), dy)
    total = torch.zeros(64, device="cuda", dtype=F64)
    for image in range(shape[0]):
        part = x[image : image + 1].detach().float().requires_grad_()
        expected = F.silu(F.group_norm(part, 32, w, b, EPS))
        wanted = torch.autograd.grad(expected, (part, w), dy[image : image + 1].float())
        total += wanted[1]
        if image in (0, 7, 8):
            torch.testing.assert_close(y[image : image + 1].float(), expected, rtol=1e-2, atol=1e-2)
            torch.testing.assert_close(dx[image : image + 1].float(), wanted[0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(dw.double(), total, rtol=1e-3, atol=10)
