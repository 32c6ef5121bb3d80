"""The focal loss's ops against float64, on everything that can serve them, and as users call them."""

from __future__ import annotations

import lists
import pytest
import torch
from lists import BF16, F16, F32, F64

from apex._legacy import focal_loss_cuda
from apex.contrib.focal_loss import focal_loss as module
from apex.contrib.focal_loss.focal_loss import FocalLoss, focal_loss
from tests.L0.signatures import signature

DTYPES = [F32, F16, BF16, F64]
# (logits, real classes): nothing; one; odd; padded; as a detector's; wider than a tile.
CASES = [((0, 8), 8), ((3, 1), 1), ((5, 7), 5), ((2, 33, 16), 13), ((4, 9, 88), 80), ((7, 301), 299)]
ALPHA = 0.24


def make(shape, real, dtype, device, seed=1):
    """(logits that require gradients, targets with background and what does not count, number of positives)"""
    logits = lists.random(dtype, device, (shape,), scale=3.0, seed=seed)[0].requires_grad_()
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(-2, real, shape[:-1], generator=generator, device="cpu", dtype=torch.int64)
    return logits, targets.to(device), torch.tensor(3.5, device=device, dtype=F32)


def exact(logits, targets, num_positives, real, alpha, gamma, smoothing):
    """The loss in float64, differentiable, from torch's elementary ops."""
    x = logits[..., :real]
    targets = targets.cpu().unsqueeze(-1)
    positive = targets == torch.arange(real, device="cpu", dtype=torch.int64)
    p, q = torch.sigmoid(x), torch.sigmoid(-x)
    t = positive.double() * (1 - smoothing) + smoothing / 2
    entropy = torch.nn.functional.binary_cross_entropy_with_logits(x, t, reduction="none")
    factor = torch.where(positive, alpha * q**gamma, (1 - alpha) * p**gamma)
    return (factor * entropy).masked_fill(targets == -2, 0).sum() / num_positives.cpu().double().reshape(())


def check(logits, targets, num_positives, real, gamma=2.0, smoothing=0.0):
    """Forward and backward against float64; returns (loss, gradient)."""
    loss = focal_loss(logits, targets, num_positives, real, ALPHA, gamma, smoothing)
    assert loss.shape == () and loss.dtype == (F64 if logits.dtype == F64 else F32)
    (found,) = torch.autograd.grad(loss, logits, torch.tensor(0.7, dtype=loss.dtype, device=loss.device))
    assert found.dtype == logits.dtype and found.shape == logits.shape
    wide = logits.detach().cpu().double().requires_grad_()
    expected = exact(wide, targets, num_positives, real, ALPHA, gamma, smoothing)
    (wanted,) = torch.autograd.grad(expected, wide, torch.tensor(0.7, dtype=F64, device="cpu"))
    work = lists.ROUNDING[loss.dtype]
    torch.testing.assert_close(
        loss.detach().cpu().double(), expected.detach(), rtol=64 * work, atol=64 * work
    )
    torch.testing.assert_close(
        found.cpu().double(), wanted, rtol=1.01 * lists.ROUNDING[found.dtype] + 64 * work, atol=64 * work
    )
    assert found[..., real:].eq(0).all() and found[targets == -2].eq(0).all()
    return loss.detach(), found


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(variant, dtype, smoothing):
    for shape, real in CASES:
        for gamma in (2.0, 0.0, 1.7):
            check(*make(shape, real, dtype, variant.device), real, gamma, smoothing)


def test_targets_and_layouts(variant):
    device = variant.device
    for dtype in (F32, BF16):
        logits, targets, n = make((9, 40), 36, dtype, device)
        check(logits, targets.int(), n, 36)
        check(logits, targets, n.double().reshape(1, 1), 36)
        for strange in (-7, 38, 1000, 2**40):  # no class: background
            targets[3] = strange
            check(logits, targets, n, 36)
        check(
            make((40, 9), 9, dtype, device)[0].t(), torch.arange(9, device=device, dtype=torch.int64), n, 40
        )
        check(lists.misaligned([logits.detach()])[0].requires_grad_(), targets, n, 36)
    check(logits, torch.full_like(targets, -2), n, 36)
    check(logits, torch.full_like(targets, -1), n, 0)


def test_extreme_logits(variant):
    """As accurate where a probability is nearly 0 or 1, which is where a detector's are."""
    x = (
        torch.tensor([[-80.0, -30, -12, -5, 0, 5, 12, 30, 80]], device=variant.device, dtype=F32)
        .repeat(2, 1)
        .requires_grad_()
    )
    for target in range(9):
        targets = torch.tensor([target, -1], dtype=torch.int64, device=variant.device)
        loss = focal_loss(x, targets, torch.ones((), device=variant.device, dtype=F32), 9, ALPHA, 2.0)
        (gradient,) = torch.autograd.grad(loss, x)
        wide = x.detach().cpu().double().requires_grad_()
        (wanted,) = torch.autograd.grad(
            exact(wide, targets, torch.ones((), dtype=F32, device="cpu"), 9, ALPHA, 2.0, 0.0), wide
        )
        torch.testing.assert_close(gradient.cpu().double(), wanted, rtol=2e-5, atol=1e-30)


def test_same_bits_and_untouched_inputs(variant):
    logits, targets, n = make((50, 88), 80, BF16, variant.device)
    before = logits.detach().clone()
    first, again = (check(logits, targets, n, 80, 2.0, 0.1) for _ in range(2))
    lists.assert_same_bits(first, again)
    lists.assert_same_bits([logits], [before])


@pytest.mark.parametrize(
    "change, error, text",
    [
        (lambda x, t, n, c: (x.int(), t, n, c), TypeError, "not"),
        (lambda x, t, n, c: (x, t.float(), n, c), TypeError, "targets are int64 or int32"),
        (lambda x, t, n, c: (x, t[:2], n, c), ValueError, "need targets of the same shape"),
        (lambda x, t, n, c: (x, t, n.repeat(2), c), ValueError, "one element"),
        (lambda x, t, n, c: (x, t, n, 11), ValueError, "11 real classes do not fit"),
        (lambda x, t, n, c: (x, t, n, -1), ValueError, "-1 real classes do not fit"),
    ],
)
def test_bad_arguments(variant, change, error, text):
    logits, targets, n = make((4, 10), 10, F32, variant.device)
    with pytest.raises(error, match=text):
        focal_loss(*change(logits.detach(), targets, n, 10), ALPHA, 2.0)
    with pytest.raises(ValueError, match="label_smoothing must be between 0 and 1"):
        focal_loss(logits, targets, n, 10, ALPHA, 2.0, 1.5)


def test_public_names():
    wanted = "ctx, cls_output, cls_targets_at_level, num_positives_sum, num_real_classes, alpha, gamma"
    assert signature(FocalLoss.forward) == f"({wanted}, label_smoothing=0.0)"
    assert module.FocalLoss is FocalLoss
    logits, targets, n = make((4, 10), 10, F32, "cpu")
    assert torch.equal(
        FocalLoss.apply(logits, targets, n, 10, ALPHA, 2.0), focal_loss(logits, targets, n, 10, ALPHA, 2.0)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_focal_loss_cuda(variant, dtype):
    logits, targets, n = make((6, 24), 20, dtype, variant.device)
    loss, partial = focal_loss_cuda.forward(logits, targets, n, 20, ALPHA, 2.0, 0.1)
    own, gradient = check(logits, targets, n, 20, 2.0, 0.1)
    assert torch.equal(loss, own) and not loss.requires_grad
    found = focal_loss_cuda.backward(torch.tensor(0.7, device=variant.device, dtype=F32), partial, n)
    assert found.data_ptr() == partial.data_ptr()
    torch.testing.assert_close(
        found.double(), gradient.double(), rtol=2e-2 if dtype == BF16 else 2e-3, atol=1e-6
    )


def test_around_the_op():
    """opcheck, one compiled graph for every batch, torch.func, and what is refused by name."""
    from torch._dynamo.testing import CompileCounterWithBackend

    logits, targets, n = make((6, 24), 20, F32, "cpu")
    torch.library.opcheck(
        torch.ops.apex.focal_loss_forward.default, (logits, targets, n, 20, ALPHA, 2.0, 0.1)
    )
    arguments = (torch.ones((), dtype=F32, device="cpu"), logits.detach(), targets, n, 20, ALPHA, 2.0, 0.1)
    torch.library.opcheck(torch.ops.apex.focal_loss_backward.default, arguments)
    counter = CompileCounterWithBackend("aot_eager")

    def function(x, t, n):
        return focal_loss(x * 2, t, n, 20, ALPHA, 2.0)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for batch in (6, 3, 11):
        x, t, n = make((batch, 24), 20, F32, "cpu")
        ours, eager = (torch.autograd.grad(f(x, t, n), x)[0] for f in (compiled, function))
        torch.testing.assert_close(ours, eager)
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1
    found = torch.func.grad(lambda x: focal_loss(x, t, n, 20, ALPHA, 2.0))(x.detach())
    torch.testing.assert_close(found, torch.autograd.grad(focal_loss(x, t, n, 20, ALPHA, 2.0), x)[0])
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: focal_loss(x, t, n, 20, ALPHA, 2.0), (x.detach(),), (x.detach(),))
    (gradient,) = torch.autograd.grad(focal_loss(x, t, n, 20, ALPHA, 2.0), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        gradient.sum().backward()
    with torch.autocast("cpu", BF16):
        assert focal_loss(x.bfloat16(), t, n, 20, ALPHA, 2.0).dtype == F32
