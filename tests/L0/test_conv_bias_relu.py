"""conv_bias_relu against float64: torch's convolution, and one pass behind it on everything that can serve it."""

from __future__ import annotations

import itertools

import lists
import pytest
import torch
import torch.nn.functional as F
from lists import BF16, F16, F32, F64
from torch.library import opcheck

from apex._loader import bindings

bindings.load()
op = torch.ops.apex
pytestmark = pytest.mark.usefixtures("exact_convolutions")
LAST, FIRST = torch.channels_last, torch.contiguous_format
# (input, outputs, kernel, stride, padding): whole vectors; odd; 1x1 with stride; one pixel; no images; padding alone
# makes the input large enough.
SHAPES = [
    ((2, 8, 7, 6), 16, (3, 3), 1, 1),
    ((1, 3, 8, 5), 5, (3, 2), 2, 0),
    ((3, 16, 5, 5), 24, (1, 1), 2, 0),
    ((2, 8, 1, 1), 8, (1, 1), 1, 0),
    ((0, 8, 4, 4), 8, (3, 3), 1, 1),
    ((1, 4, 1, 2), 8, (3, 3), 1, 2),
]


class Case:
    """The tensors of a call, requiring gradients."""

    def __init__(self, shape, dtype, device, format=LAST, affine=None, residual=False, mask=False):
        size, outputs, kernel, self.stride, self.padding = shape
        self.depth, self.dtype = size[1] * kernel[0] * kernel[1], dtype
        out = [(n + 2 * self.padding - k) // self.stride + 1 for n, k in zip(size[2:], kernel, strict=True)]
        self.sizes = (size[0], outputs, *out)
        make = lambda seed, size, scale=1.0, kind=dtype: lists.random(kind, device, (size,), scale, seed)[0]  # noqa: E731
        like = lambda t: t.contiguous(memory_format=format).requires_grad_()  # noqa: E731
        self.x, self.w = like(make(1, size)), like(make(2, (outputs, size[1], *kernel), self.depth**-0.5))
        self.scale = make(3, (outputs,), kind=affine or dtype)
        self.bias = make(4, (outputs,), 0.5, affine or dtype).requires_grad_()
        self.g = like(make(5, self.sizes)).detach()
        self.residual = like(make(6, self.sizes)) if residual else None
        self.mask = (make(7, self.sizes) > 0).to(torch.int8) if mask else None

    def arguments(self, scale=True, bias=True, relu=True):
        numbers = self.scale if scale else None, self.bias if bias else None
        return self.x, self.w, *numbers, self.residual, self.mask, self.stride, self.padding, relu

    def check(self, scale=True, bias=True, relu=True):
        """Values and gradients, which are returned."""
        y = op.conv_bias_relu_forward(*self.arguments(scale, bias, relu))
        leaves = [t for t in (self.x, self.w, self.bias if bias else None, self.residual) if t is not None]
        wide = [t.detach().to("cpu", F64).requires_grad_() for t in leaves]
        x, w, *more = wide
        u = F.conv2d(x, w, None, self.stride, self.padding)
        if scale:
            u = u * self.scale.cpu().double().view(1, -1, 1, 1)
        for i, t in enumerate(more):
            u = u + (t.view(1, -1, 1, 1) if bias and i == 0 else t)
        wanted = torch.relu(u) if relu else u
        if self.mask is not None:
            wanted = wanted * (self.mask.cpu() != 0)
        assert y.dtype == self.dtype and y.shape == self.sizes
        near(y, wanted, self.dtype, self.depth)
        found = torch.autograd.grad(y, leaves, self.g)
        # By the signs that the output has: near 0 float64 may have others.
        passed = self.g.cpu().double() * (y.cpu() > 0) if relu else self.g.cpu().double()
        terms = max(1, y.numel() // max(1, y.shape[1])) + self.depth * y.shape[1]
        for a, b in zip(found, torch.autograd.grad(u, wide, passed), strict=True):
            near(a, b, a.dtype, terms)
        return [y, *found]


def near(found, wanted, dtype, terms):
    """Within four roundings to the dtype and those of a sum of so many products in float32."""
    unit, work = lists.ROUNDING[dtype], lists.ROUNDING[lists.math_dtype(dtype)]
    scale = max(1.0, wanted.abs().max().item()) if wanted.numel() else 1.0
    bound = (4 * unit + terms * work) * scale
    torch.testing.assert_close(found.detach().cpu().double(), wanted.detach(), rtol=4 * unit, atol=bound)


@pytest.mark.parametrize("format", [LAST, FIRST], ids=["last", "first"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=str)
def test_values(variant, dtype, format):
    """Every combination of what may follow the convolution, in both memory formats; the same bits again."""
    for i, shape in enumerate(SHAPES):
        for scale, bias, relu, residual in itertools.product((True, False), repeat=4):
            if variant.simt and i and not (scale and bias and relu):
                continue  # the same kernels
            case = Case(shape, dtype, variant.device, format, residual=residual)
            found = case.check(scale, bias, relu)
            assert found[0].is_contiguous(memory_format=format)
    lists.assert_same_bits(case.check(), case.check())
    if variant.simt and format is LAST and dtype is F16:
        names = {name.rsplit("_", 1)[0] for name in variant.kernels}
        assert {"batchnorm_forward_last", "bias_activation_backward"} <= names


@pytest.mark.parametrize("format", [LAST, FIRST], ids=["last", "first"])
@pytest.mark.parametrize("dtype, affine", [(F16, F32), (BF16, F16), (F32, BF16)], ids=str)
def test_scale_and_bias_of_another_dtype(variant, dtype, affine, format):
    for shape in SHAPES[:3]:
        for residual in (False, True):
            found = Case(shape, dtype, variant.device, format, affine, residual).check()
            assert found[3].dtype == affine


@pytest.mark.parametrize("format", [LAST, FIRST], ids=["last", "first"])
def test_mask(variant, format):
    """What is masked is 0 and passes nothing; masks of any dtype mean the same."""
    for dtype in (F32, F16):
        case = Case(SHAPES[0], dtype, variant.device, format, mask=True)
        found = case.check(scale=False)
        assert not found[0][case.mask == 0].any()
        plain = case.mask
        for other in (torch.bool, torch.uint8, torch.uint16, torch.float8_e4m3fn, F32):
            case.mask = plain.to(other)
            lists.assert_same_bits(case.check(scale=False), found)


def test_formats_and_layouts(variant):
    """Either operand in channels last makes the output so, as torch does; strides do not count, values do."""
    case = Case(SHAPES[0], F32, variant.device, FIRST)
    plain = case.check()
    last = lambda t: t.detach().contiguous(memory_format=LAST).requires_grad_()  # noqa: E731
    cut = lambda t: torch.stack((t.detach(), t.detach()), -1)[..., 0].requires_grad_()  # noqa: E731
    off = lambda t: lists.misaligned([t.detach()])[0].requires_grad_()  # noqa: E731
    for of_x, of_w in ((last, cut), (cut, last), (off, off), (cut, cut), (last, last)):
        x, w = case.x, case.w
        case.x, case.w = of_x(x), of_w(w)
        found = case.check()
        format = LAST if last in (of_x, of_w) else FIRST
        assert all(t.is_contiguous(memory_format=format) for t in found[:3])
        for a, b in zip(found, plain, strict=True):
            near(a, b.cpu().double(), F32, 999)
        case.x, case.w = x, w


def test_what_is_not_finite(variant):
    """A nan stays and passes the gradient on, as in torch; infinities below 0 become 0."""
    for format in (LAST, FIRST):
        x = torch.ones(1, 8, 2, 2, dtype=F32, device=variant.device).contiguous(memory_format=format)
        x[0, 0, 0, 0], x[0, 0, 1, 1] = float("nan"), -float("inf")
        x.requires_grad_()
        w = torch.ones(8, 8, 1, 1, dtype=F32, device=variant.device)
        y = op.conv_bias_relu_forward(x, w)
        assert y[0, :, 0, 0].isnan().all() and y[0, :, 1, 1].eq(0).all() and y[0, :, 0, 1].eq(8).all()
        (g,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert g[0, :, 0, 0].eq(8).all() and g[0, :, 1, 1].eq(0).all()


def test_gradients_that_nobody_wants_are_not_made(variant):
    case = Case(SHAPES[0], F32, variant.device, residual=True)
    every = case.check()[1:]
    tensors = [case.x, case.w, case.bias, case.residual]
    for i in range(4):
        for j, t in enumerate(tensors):
            t.requires_grad_(i == j)
        y = op.conv_bias_relu_forward(*case.arguments())
        (one,) = torch.autograd.grad(y, tensors[i], case.g)
        lists.assert_same_bits([one], [every[i]])
    plain = [t.detach() for t in (case.g, case.x, case.w, case.scale, case.bias, case.g)]
    none = op.conv_bias_relu_backward(*plain, 1, 1, False, False, False, False)
    assert [t.numel() for t in none] == [0, 0, 0, 0]
    assert len({t.untyped_storage()._cdata for t in none}) == 4, "no result may alias another"


@pytest.mark.parametrize("format", [LAST, FIRST], ids=["last", "first"])
@pytest.mark.parametrize("relu", [True, False], ids=["relu", "plain"])
def test_gradients_of_gradients(relu, format):
    case = Case(((1, 2, 3, 3), 2, (2, 2), 1, 1), F64, "cpu", format, residual=True)
    x, w, scale, bias, residual, *_ = case.arguments()
    run = lambda x, w, b, r: op.conv_bias_relu_forward(x, w, scale, b, r, None, 1, 1, relu)  # noqa: E731
    assert torch.autograd.gradcheck(run, (x, w, bias, residual))
    assert torch.autograd.gradgradcheck(run, (x, w, bias, residual))


def test_autocast():
    """What is convolved and added is cast; scale and bias stay, and get gradients in their own dtype."""
    case = Case(SHAPES[0], F32, "cpu", residual=True)
    with torch.autocast("cpu", BF16):
        y = op.conv_bias_relu_forward(*case.arguments())
    assert y.dtype == BF16
    gradients = torch.autograd.grad(y.float().sum(), (case.x, case.w, case.bias, case.residual))
    assert {g.dtype for g in gradients} == {F32}


@pytest.mark.parametrize("format", [LAST, FIRST], ids=["last", "first"])
def test_opcheck(format):
    for mask, residual in ((False, True), (True, False)):
        case = Case(SHAPES[0], F32, "cpu", format, residual=residual, mask=mask)
        opcheck(op.conv_bias_relu_forward, case.arguments())
        opcheck(op.conv_bias_relu_forward, (case.x, case.w))
        x, w, scale, bias, *_ = case.arguments()
        for output in (case.g, None):
            opcheck(
                op.conv_bias_relu_backward, (case.g, x, w, scale, bias, output, 1, 1, True, True, True, True)
            )


def test_sizes_that_change(counting_backend):
    """One graph serves images of other sizes."""
    case = Case(SHAPES[0], F32, "cpu")
    _, w, scale, bias, *_ = case.arguments()
    run = lambda x: op.conv_bias_relu_forward(x, w, scale, bias, None, None, 2, 1, True)  # noqa: E731
    graph = torch.compile(run, fullgraph=True, dynamic=True, backend=counting_backend)
    for shape in ((2, 8, 7, 6), (3, 8, 9, 5), (5, 8, 12, 12)):
        x = lists.random(F32, "cpu", (shape,))[0].contiguous(memory_format=LAST).requires_grad_()
        (found,) = torch.autograd.grad(graph(x).square().sum(), x)
        lists.assert_same_bits([found], torch.autograd.grad(run(x).square().sum(), x))
    assert counting_backend.frame_count == 1


def test_refused():
    """Every wrong shape, dtype, device and number, before anything runs."""
    case = Case(SHAPES[0], F32, "cpu")
    x, w, s, b = (t.detach() for t in (case.x, case.w, case.scale, case.bias))
    y = case.g
    none = (None,) * 4
    for error, text, arguments in [
        (ValueError, "do not fit", (x[0], w)),
        (ValueError, "no groups", (x, w[:, :4])),
        (ValueError, "larger than the input", (x[:, :, :1, :1], w)),
        (ValueError, "has no elements", (x[:, :0], w[:, :0])),
        (ValueError, "has no elements", (x, w[:0])),
        (ValueError, "has no elements", (x, w[:, :, :0])),
        (ValueError, "stride must be at least 1", (x, w, *none, 0, 1)),
        (ValueError, "padding 0", (x, w, *none, 1, -1)),
        (ValueError, "the weight 16 outputs", (x, w, s[:3])),
        (ValueError, "the weight 16 outputs", (x, w, s, b[None])),
        (ValueError, "residual has shape", (x, w, s, b, y[:1], None, 1, 1)),
        (ValueError, "mask has shape", (x, w, s, b, None, y[:1] > 0, 1, 1)),
        (ValueError, "goes with a ReLU", (x, w, s, b, None, y > 0, 1, 1, False)),
        (ValueError, "bias is on meta", (x, w, None, b.to("meta"))),
        (TypeError, "not Int|torch.int32", (x.int(), w.int())),
        (TypeError, "weight", (x, w.half())),
        (TypeError, "residual", (x, w, s, b, y.half(), None, 1, 1)),
        (TypeError, "float64 alone", (x, w, s.double())),
        (TypeError, "one dtype", (x, w, s.half(), b)),
    ]:
        with pytest.raises(error, match=text):
            op.conv_bias_relu_forward(*arguments)
    with pytest.raises(ValueError, match="gradient has shape"):
        op.conv_bias_relu_backward(y[:1], x, w, s, b, y, 1, 1)
    with pytest.raises(ValueError, match="forward kept has shape"):
        op.conv_bias_relu_backward(y, x, w, s, b, y[:1], 1, 1)
    with pytest.raises(TypeError, match="gradient has dtype Half, not Float"):
        op.conv_bias_relu_backward(y.half(), x, w, s, b, y, 1, 1)
