"""The cross-entropy ops against float64, on everything that can serve them."""

from __future__ import annotations

import lists
import pytest
import torch
import torch.nn.functional as F
from lists import BF16, F16, F32, F64

from apex._loader import bindings

bindings.load()
DTYPES = [F32, F16, BF16, F64]
# No rows; one class; odd; a warp a row; several dimensions; a block a row; several blocks a row.
SHAPES = [(0, 7), (3, 1), (5, 7), (9, 1000), (2, 3, 130), (3, 5003), (1, 40003)]


def make(shape, dtype, device, seed=1, scale=3.0):
    """(logits that require gradients, labels)"""
    logits = lists.random(dtype, device, (shape,), scale=scale, seed=seed)[0].requires_grad_()
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, shape[-1], shape[:-1], generator=generator, device="cpu", dtype=torch.int64)
    return logits, labels.to(device)


def run(logits, labels, smoothing=0.0, padding_idx=None, half_to_float=False):
    """The losses alone."""
    return torch.ops.apex.xentropy_forward(logits, labels, smoothing, padding_idx, half_to_float)[0]


def exact(logits, labels, smoothing, ignored):
    """(losses, gradient for a function of the losses' gradient, what the gradient's parts add up from)"""
    x = logits.detach().cpu().double()
    index = labels.cpu().long().masked_fill(ignored, 0)
    log_p = F.log_softmax(x, -1)
    target = F.one_hot(index, x.shape[-1]).double() * (1 - smoothing) + smoothing / x.shape[-1]
    losses = -(target * log_p).sum(-1).masked_fill(ignored, 0)

    def gradient(g):
        g = g.detach().cpu().double().masked_fill(ignored, 0).unsqueeze(-1)
        return g * (log_p.exp() - target), g.abs() * (log_p.exp() + target)

    return losses, gradient


def check(logits, labels, smoothing=0.0, padding_idx=None, half_to_float=False):
    """Forward and backward against float64; returns (losses, gradient)."""
    ignored = (labels == -100).cpu()
    if padding_idx is not None:
        ignored |= (labels == padding_idx).cpu()
    losses = run(logits, labels, smoothing, padding_idx, half_to_float)
    half = logits.dtype in (F16, BF16)
    assert losses.dtype == (F32 if half and half_to_float else logits.dtype)
    assert losses.shape == labels.shape and losses.is_contiguous()
    g = lists.random(losses.dtype, losses.device, (tuple(losses.shape),), seed=5)[0]
    (found,) = torch.autograd.grad(losses, logits, g)
    assert found.dtype == logits.dtype and found.shape == logits.shape
    expected, gradient = exact(logits, labels, smoothing, ignored)
    work = lists.ROUNDING[lists.math_dtype(logits.dtype)]
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(
        losses.detach().cpu().double(),
        expected,
        rtol=1.01 * lists.ROUNDING[losses.dtype],
        atol=16 * scale * work,
    )
    wanted, size = gradient(g)
    error = (found.cpu().double() - wanted).abs()
    allowed = (
        1.01 * lists.ROUNDING[found.dtype] * wanted.abs() + 64 * work * size + lists.SMALLEST[found.dtype]
    )
    assert (error <= allowed).all(), f"largest error {error.max()}, where {allowed.min()} is allowed"
    if ignored.any():
        assert losses[ignored].eq(0).all() and found[ignored].eq(0).all()
    return losses.detach(), found


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(variant, dtype, smoothing):
    for shape in SHAPES:
        check(*make(shape, dtype, variant.device), smoothing)
    if variant.simt:
        assert any("merge" in kernel for kernel in variant.kernels)


@pytest.mark.parametrize("half_to_float", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padding_and_ignored_labels(variant, dtype, half_to_float):
    """Report: bfloat16 with half_to_float was refused; ignored labels and the padding index."""
    for classes in (32001, 101, 120):
        logits, labels = make((7, classes), dtype, variant.device)
        labels[1], labels[4], labels[6] = 2, -100, classes - 1
        check(logits, labels.to(torch.int32), 0.1, 2, half_to_float)
    for padding_idx in (0, None, -100, -1):
        check(logits, labels, 0.1, padding_idx, half_to_float)
    labels[0] = -1
    check(logits, labels, 0.0, -1, half_to_float)
    labels[:] = -100
    check(logits, labels, 0.0, None, half_to_float)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_layouts(variant, dtype):
    """A slice of a padded vocabulary, transposed logits, rows between two vectors, one gradient for all rows."""
    device = variant.device
    for classes in (130, 1031, 5003):
        padded, labels = make((4, classes + 5), dtype, device)
        labels %= classes
        for logits in (
            padded[:, :classes],
            padded[:, 3 : classes + 3],
            padded[::2, 1 : classes + 1],
            make((classes, 4), dtype, device)[0].t(),
            lists.misaligned([padded[:, :classes].detach()])[0].requires_grad_(),
        ):
            if not logits.is_leaf:
                logits.retain_grad()
            check(logits, labels[: len(logits)], 0.1)
    check(make((2, 6, 40), dtype, device)[0][:, ::2, 1:30], make((2, 3, 29), dtype, device)[1], 0.1)
    logits, labels = make((6, 300), dtype, device)
    losses = run(logits, labels)
    (of_sum,) = torch.autograd.grad(losses.sum(), logits, retain_graph=True)
    (of_ones,) = torch.autograd.grad(losses, logits, torch.ones_like(losses))
    assert torch.equal(of_sum, of_ones)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("classes", [7, 500, 1000, 100000])
def test_rows_of_minus_infinity(variant, classes, smoothing):
    """Report: one logit of 10 among -inf gave nan. Loss 0 without smoothing, inf with it; gradients are finite."""
    logits = torch.full((1, classes), float("-inf"), device=variant.device, dtype=F32)
    logits[0, classes // 2] = 10
    logits.requires_grad_()
    labels = torch.tensor([classes // 2], dtype=torch.int64, device=variant.device)
    losses = run(logits, labels, smoothing)
    assert losses.item() == (0 if smoothing == 0 else float("inf"))
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert gradient.isfinite().all()
    expected = torch.full((1, classes), -smoothing / classes, dtype=F32, device="cpu")
    expected[0, classes // 2] += smoothing
    torch.testing.assert_close(gradient.cpu(), expected)


@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
def test_special_values_stay_in_their_rows(variant, dtype):
    """As torch's cross_entropy, element for element: inf, nan, all -inf, masks of the least finite number."""
    least, inf, nan = torch.finfo(dtype).min, float("inf"), float("nan")
    for classes in (9, 96, 1100):
        logits, labels = make((8, classes), dtype, variant.device)
        with torch.no_grad():
            logits[0, 3], logits[1, 5], logits[2], logits[3] = inf, nan, -inf, least
            logits[4, 1:], logits[5] = least, -least
            logits[6, labels[6]] = -inf
        for smoothing in (0.0, 0.1):
            losses = run(logits, labels, smoothing)
            (gradient,) = torch.autograd.grad(losses.sum(), logits)
            wide = logits.detach().cpu().to(F64).requires_grad_()
            expected = F.cross_entropy(wide, labels.cpu(), reduction="none", label_smoothing=smoothing)
            (wanted,) = torch.autograd.grad(expected.sum(), wide)
            rows = (
                [0, 1, 2, 6, 7] if smoothing else range(8)
            )  # sums of least numbers overflow float32, not float64
            tolerance = dict(rtol=1e-2 if dtype == BF16 else 1e-5, atol=1e-6, equal_nan=True)
            for row in rows:
                torch.testing.assert_close(losses[row].cpu().double(), expected[row], **tolerance)
            torch.testing.assert_close(gradient.cpu().double(), wanted, **tolerance)


def test_large_offsets_keep_their_digits(variant):
    logits, labels = make((3, 1000), F32, variant.device)
    shifted = (logits.detach() * 64).round() / 64 + 4096  # exact in float32
    near = (shifted - 4096).requires_grad_()
    shifted.requires_grad_()
    for smoothing in (0.0, 0.1):
        a, b = run(shifted, labels, smoothing), run(near, labels, smoothing)
        torch.testing.assert_close(a, b, rtol=1e-5 if smoothing == 0 else 1e-4, atol=0)
        torch.testing.assert_close(
            *(torch.autograd.grad(y.sum(), x)[0] for y, x in ((a, shifted), (b, near)))
        )


def test_labels_outside_are_refused_on_a_cpu(variant):
    logits, labels = make((4, 10), F32, variant.device)
    for wrong in (10, -1, 2**40, -(2**40)):
        labels[2] = wrong
        if variant.device.type == "cpu":
            with pytest.raises(IndexError, match=f"label {wrong} is outside"):
                run(logits, labels)
        else:
            losses = run(logits, labels)
            (gradient,) = torch.autograd.grad(losses.sum(), logits)
            outside = torch.tensor([False, False, True, False], device=variant.device, dtype=torch.bool)
            assert torch.equal(losses.isnan(), outside)
            assert torch.equal(gradient.isnan().all(-1), outside) and torch.equal(
                gradient.isnan().any(-1), outside
            )


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_the_callers_tensors_stay(variant, dtype):
    """Report: the loss changed logits that a second loss then used; public apex also writes to the gradient."""
    logits, labels = make((4, 5003), dtype, variant.device)
    labels[1] = 0
    before = [logits.detach().clone(), labels.clone()]
    losses = run(logits, labels, 0.1, 0)
    g = torch.ones_like(losses)
    losses.backward(g)
    lists.assert_same_bits([logits, labels, g], [*before, torch.ones_like(losses)])


def test_same_bits(variant):
    for shape in ((5, 1000), (3, 5003), (1, 40003)):
        logits, labels = make(shape, BF16, variant.device)
        lists.assert_same_bits(check(logits, labels, 0.1), check(logits, labels, 0.1))


def test_no_worse_than_torch(variant):
    """The error against float64, in the same dtype, of losses and gradients."""
    for dtype in (F32, BF16, F16):
        logits, labels = make((16, 2000), dtype, variant.device)
        wide = logits.detach().double().requires_grad_()
        expected = F.cross_entropy(wide, labels, reduction="none", label_smoothing=0.1)
        wanted = torch.autograd.grad(expected.sum(), wide)[0]

        def errors(losses, wanted=(expected, wanted), logits=logits):
            gradient = torch.autograd.grad(losses.sum(), logits)[0]
            return [
                ((a.double() - b).square().mean().sqrt(), a.numel())
                for a, b in zip((losses, gradient), wanted, strict=True)
            ]

        theirs = errors(F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1))
        for (a, count), (b, _) in zip(errors(run(logits, labels, 0.1)), theirs, strict=True):
            # Of n numbers the root mean squares of two like samples differ by about a sqrt(n)-th; there are 16 losses,
            # and torch's depend on the processor.
            assert a <= (1.1 + count**-0.5) * b + 1e-8


@pytest.mark.parametrize(
    "change, error, text",
    [
        (lambda x, t: (x.long(), t), TypeError, "not"),
        (lambda x, t: (x, t.float()), TypeError, "labels are int64 or int32"),
        (lambda x, t: (x, t.to(torch.int16)), TypeError, "labels are int64 or int32"),
        (lambda x, t: (x, t[:2]), ValueError, "need labels of the same shape"),
        (lambda x, t: (x, t.unsqueeze(-1)), ValueError, "need labels of the same shape"),
        (lambda x, t: (x[0, 0], t), ValueError, "need labels of the same shape"),
        (lambda x, t: (x[:, :0], t), ValueError, "no classes"),
        (lambda x, t: (x, t, 1.5), ValueError, "smoothing must be between 0 and 1"),
        (lambda x, t: (x, t, -0.1), ValueError, "smoothing must be between 0 and 1"),
        (lambda x, t: (x, t, float("nan")), ValueError, "smoothing must be between 0 and 1"),
    ],
)
def test_bad_arguments(variant, change, error, text):
    from apex.contrib.xentropy import SoftmaxCrossEntropyLoss

    logits, labels = make((4, 10), F32, variant.device)
    with pytest.raises(error, match=text):
        SoftmaxCrossEntropyLoss.apply(*change(logits.detach(), labels))


@pytest.mark.gpu
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_more_than_two_to_the_31_logits(smoothing):
    """Report: index overflow at 18423 x 131072: equal to a reference made of chunks, last rows included."""
    rows, classes = 18423, 131072
    if torch.cuda.mem_get_info()[0] < 14 << 30:
        pytest.skip("needs 14 GiB of GPU memory")
    logits = torch.empty(rows, classes, device="cuda", dtype=BF16).normal_().requires_grad_()
    labels = torch.randint(0, 50263, (rows,), device="cuda", dtype=torch.int64)
    losses = run(logits, labels, smoothing, None, True)
    (gradient,) = torch.autograd.grad(losses.mean(), logits)
    for first in (0, 9000, 16383, rows - 64):
        part = logits[first : first + 64].detach().float().requires_grad_()
        expected = F.cross_entropy(
            part, labels[first : first + 64], reduction="none", label_smoothing=smoothing
        )
        torch.testing.assert_close(losses[first : first + 64], expected, rtol=1e-5, atol=1e-5)
        (wanted,) = torch.autograd.grad(expected.sum() / rows, part)
        torch.testing.assert_close(gradient[first : first + 64].float(), wanted, rtol=1e-2, atol=1e-10)
