"""SoftmaxCrossEntropyLoss and xentropy_cuda as users call them, and what torch does around the op."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lists import BF16, F16, F32, F64
from test_xentropy import make

import apex
from apex._legacy import xentropy_cuda
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from tests.L0.signatures import signature

loss = SoftmaxCrossEntropyLoss.apply
opcheck = torch.library.opcheck


def test_public_signature():
    wanted = "(logits, labels, smoothing=0.0, padding_idx=0, half_to_float=False)"
    assert signature(loss) == wanted
    assert signature(SoftmaxCrossEntropyLoss.forward) == wanted.replace("(", "(ctx, ", 1)


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_like_torch(variant, dtype):
    logits, labels = make((40, 1000), dtype, variant.device)
    labels[3] = 0
    losses = loss(logits, labels, 0.1, 0, True)
    assert losses.dtype == F32
    wide = logits.detach().float().requires_grad_()
    expected = F.cross_entropy(wide, labels, reduction="none", label_smoothing=0.1, ignore_index=0)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    ours, theirs = (torch.autograd.grad(a.mean(), x)[0] for a, x in ((losses, logits), (expected, wide)))
    torch.testing.assert_close(ours.float(), theirs, rtol=1e-2, atol=1e-6)
    assert loss(logits, labels).dtype == dtype


def test_logits_of_a_second_loss():
    """Report: the first loss changed float32 logits that a second one used."""
    logits, labels = make((6, 1000), F32, "cpu")
    before = logits.detach().clone()
    (loss(logits, labels, 0.1).sum() + loss(logits, labels).sum()).backward()
    assert torch.equal(logits.detach(), before)
    twin = before.clone().requires_grad_()
    for smoothing in (0.1, 0.0):
        F.cross_entropy(twin, labels, reduction="sum", label_smoothing=smoothing, ignore_index=0).backward()
    torch.testing.assert_close(logits.grad, twin.grad)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_double_backward(variant, smoothing):
    variant.mixed = True  # second derivatives are torch's own ops
    logits, labels = make((5, 7), F64, variant.device)
    labels[0], labels[1] = 0, -100
    assert torch.autograd.gradcheck(lambda x: loss(x, labels, smoothing), logits)
    assert torch.autograd.gradgradcheck(lambda x: loss(x, labels, smoothing), logits)


def test_torch_func():
    logits, labels = make((4, 9), F64, "cpu")
    logits = logits.detach()
    found = torch.func.grad(lambda x: loss(x, labels, 0.1).sum())(logits)
    twin = logits.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(twin, labels, 0.1).sum(), twin)
    torch.testing.assert_close(found, wanted)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: loss(x, labels, 0.1), (logits,), (logits,))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_opcheck(dtype):
    logits, labels = make((6, 33), dtype, "cpu")
    forward, backward = torch.ops.apex.xentropy_forward.default, torch.ops.apex.xentropy_backward.default
    opcheck(forward, (logits, labels, 0.1, 0, True))
    opcheck(forward, (logits.detach()[:, :20], labels % 20, 0.0, None, False))
    losses, normalizers = forward(logits.detach(), labels)
    opcheck(backward, (losses, logits.detach(), labels, normalizers, 0.1, 0))


class Head(torch.nn.Module):
    def __init__(self, classes=65):
        super().__init__()
        self.linear = torch.nn.Linear(16, classes, dtype=F32, device="cpu")

    def forward(self, x, labels):
        return loss(self.linear(x), labels, 0.1, 0, True)


def test_compile_fullgraph():
    """One graph for every batch size, equal to eager."""
    from torch._dynamo.testing import CompileCounterWithBackend

    head = Head().bfloat16()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(head, fullgraph=True, dynamic=True, backend=counter)
    for batch in (8, 3, 130):
        x = torch.randn(batch, 16, dtype=BF16, device="cpu")
        labels = torch.randint(0, 65, (batch,), device="cpu", dtype=torch.int64)
        ours = torch.autograd.grad(compiled(x, labels).sum(), list(head.parameters()))
        eager = torch.autograd.grad(head(x, labels).sum(), list(head.parameters()))
        for a, b in zip(ours, eager, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    assert counter.frame_count == 1


def test_export():
    head, x, labels = (
        Head(),
        torch.randn(8, 16, dtype=F32, device="cpu"),
        torch.randint(0, 65, (8,), device="cpu", dtype=torch.int64),
    )
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(head, (x, labels), dynamic_shapes=({0: batch}, {0: batch}))
    x, labels = (
        torch.randn(5, 16, dtype=F32, device="cpu"),
        torch.randint(0, 65, (5,), device="cpu", dtype=torch.int64),
    )
    torch.testing.assert_close(program.module()(x, labels), head(x, labels))


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_autocast(dtype):
    """Losses are float32, as torch's own; the gradient reaches float32 weights."""
    linear, labels = (
        torch.nn.Linear(16, 65, dtype=F32, device="cpu"),
        torch.randint(1, 65, (4,), device="cpu", dtype=torch.int64),
    )
    x = torch.randn(4, 16, dtype=F32, device="cpu")
    with torch.autocast("cpu", dtype):
        losses = loss(linear(x), labels)
        assert losses.dtype == F.cross_entropy(linear(x), labels).dtype == F32
    losses.sum().backward()
    assert linear.weight.grad.dtype == F32 and linear.weight.grad.isfinite().all()


def test_meta_and_fake_tensors():
    logits = torch.empty(4, 10, dtype=BF16, device="meta")
    labels = torch.empty(4, dtype=torch.int64, device="meta")
    assert loss(logits, labels, half_to_float=True).shape == (4,)
    with pytest.raises(
        ValueError, match="logits is on meta, labels is not: tensors on cpu and on the meta device"
    ):
        torch.ops.apex.xentropy_forward(logits, labels.new_zeros(4, device="cpu"))


@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=str)
def test_xentropy_cuda(variant, dtype):
    """The legacy module's functions: what they return, and that any precision of the saved tensor is taken."""
    logits, labels = make((6, 500), dtype, variant.device)
    losses, lse = xentropy_cuda.forward(logits, labels, 0.1, True)
    wide = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(wide, labels, reduction="none", label_smoothing=0.1)
    assert losses.dtype == lse.dtype == (F64 if dtype == F64 else F32) and not losses.requires_grad
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), wide.logsumexp(-1), rtol=1e-6, atol=1e-6)
    g = torch.ones_like(losses)
    (wanted,) = torch.autograd.grad(expected.sum(), wide)
    found = xentropy_cuda.backward(g, logits, lse, labels, 0.1)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, rtol=1e-2, atol=1e-5)
    # A rounded logsumexp moves every softmax by the same factor, and what is subtracted from it not at all.
    rounded = xentropy_cuda.backward(g, logits, lse.to(BF16), labels, 0.1)
    targets = F.one_hot(labels, 500).double() * 0.9 + 0.1 / 500
    wanted = (wide.detach() - lse.to(BF16).double().unsqueeze(-1)).exp() - targets
    torch.testing.assert_close(rounded.double(), wanted, rtol=1e-2, atol=1e-5)
    assert xentropy_cuda.forward(logits, labels, 0.0, False)[0].dtype == dtype
    assert xentropy_cuda.__version__ == apex.__version__
