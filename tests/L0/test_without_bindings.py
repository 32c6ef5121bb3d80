"""Losses, norms, softmax, index_mul_2d, transducer ops where no binding fits this torch: autograd from Python."""

from __future__ import annotations

import pytest
import torch
from lists import BF16, F32, F64

from apex import _loader
from apex._loader import reference, registry

NAMESPACE = "apex_test_without_bindings"


@pytest.fixture(scope="module")
def ops():
    """The pairs as the loader defines them without a binding, in a namespace of their own."""
    _loader.load()
    begins = (
        "xentropy_",
        "focal_loss_",
        "index_mul_2d_",
        "transducer_",
        "group_norm_",
        "layer_norm_",
        "masked_",
    )
    names = [n for n in registry.schemas() if n.startswith(begins)]
    library = reference.define(NAMESPACE, reference.implementation, names)
    reference.record(NAMESPACE, library, names)
    yield getattr(torch.ops, NAMESPACE)
    library._destroy()


def leaf(*shape, seed=1):
    return torch.randn(
        *shape, dtype=F64, generator=torch.Generator().manual_seed(seed), device="cpu"
    ).requires_grad_()


def test_xentropy(ops):
    logits, labels = leaf(5, 7), torch.tensor([0, 1, 2, 3, -100], device="cpu", dtype=torch.int64)
    assert torch.autograd.gradcheck(lambda x: ops.xentropy_forward(x, labels, 0.1, 0, False)[0], logits)
    with torch.autocast("cpu", BF16):
        assert ops.xentropy_forward(logits.bfloat16(), labels)[0].dtype == F32
    normalizers = ops.xentropy_forward(logits.detach(), labels, 0.1, 0)[1]
    g = leaf(5, seed=2)
    found, wanted = (
        torch.autograd.grad(
            o.xentropy_backward(g, logits, labels, normalizers, 0.1, 0).square().sum(), (g, logits)
        )
        for o in (ops, torch.ops.apex)
    )
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_focal_loss(ops):
    logits, targets, num_positives = (
        leaf(5, 7),
        torch.tensor([0, 1, -1, 3, -2], device="cpu", dtype=torch.int64),
        torch.tensor(2.0, dtype=F64, device="cpu"),
    )
    arguments = (targets, num_positives, 6, 0.25, 2.0, 0.1)
    assert torch.autograd.gradcheck(lambda x: ops.focal_loss_forward(x, *arguments), logits)
    gradient = ops.focal_loss_backward(torch.ones((), dtype=F64, device="cpu"), logits, *arguments)
    with pytest.raises(NotImplementedError, match="double backward"):
        gradient.sum().backward()


def test_index_mul_2d(ops):
    in1, in2, g, index = (
        leaf(3, 4),
        leaf(5, 4, seed=2),
        leaf(5, 4, seed=3),
        torch.tensor([0, 2, 2, 1, 0], device="cpu", dtype=torch.int64),
    )
    assert torch.autograd.gradcheck(lambda a, b: ops.index_mul_2d_forward(a, b, index), (in1, in2))
    assert torch.autograd.gradcheck(lambda a, b, g: ops.index_mul_2d_backward(g, a, b, index), (in1, in2, g))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_masked_softmax_dropout(ops, dropout):
    x, tail = leaf(2, 3, 5), (dropout, torch.tensor([7], device="cpu", dtype=torch.int64))
    mask = torch.tensor([0, 1, 0, 0, 1], device="cpu", dtype=torch.bool)
    assert torch.autograd.gradcheck(lambda x: ops.masked_softmax_dropout_forward(x, mask, *tail)[0], x)
    with torch.autocast("cpu", BF16):
        assert ops.masked_softmax_dropout_forward(x.float(), mask, *tail)[0].dtype == BF16
    output, softmax, _ = ops.masked_softmax_dropout_forward(x, mask, *tail)
    (first,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    grad = torch.ones_like(output).requires_grad_()
    before = softmax if dropout else output
    found = ops.masked_softmax_dropout_backward(grad, before.detach(), None, *tail)
    torch.testing.assert_close(found, first)
    assert torch.autograd.gradgradcheck(lambda x: ops.masked_softmax_dropout_forward(x, mask, *tail)[0], x)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_transducer_joint(ops, dropout):
    f, g, lengths = (
        leaf(2, 3, 5),
        leaf(2, 2, 5, seed=2),
        (
            torch.tensor([3, 2], device="cpu", dtype=torch.int64),
            torch.tensor([1, 2], device="cpu", dtype=torch.int64),
        ),
    )
    tail = (None, 0, True, dropout, torch.tensor([7], device="cpu", dtype=torch.int64) if dropout else None)
    assert torch.autograd.gradcheck(
        lambda f, g: ops.transducer_joint_forward(f, g, *lengths, *tail)[0], (f, g)
    )
    with torch.autocast("cpu", BF16):
        assert ops.transducer_joint_forward(f.bfloat16(), g.float(), *lengths)[0].dtype == F32
    output, mask = ops.transducer_joint_forward(f, g, *lengths, *tail)
    (first,) = torch.autograd.grad(output.sum(), f, create_graph=True)
    grad, known = torch.ones_like(output).requires_grad_(), (*lengths, None, 3, 2)
    kept = (None, None, mask) if dropout else (f.detach(), g.detach(), None)
    found, _ = ops.transducer_joint_backward(grad, *kept, *known, 2.0 if dropout else 1.0)
    torch.testing.assert_close(found, first)
    with pytest.raises(NotImplementedError, match="double backward"):
        found.sum().backward()


@pytest.mark.parametrize("log_probs", [False, True])
def test_transducer_loss(ops, log_probs):
    x, label, lengths = (
        leaf(2, 3, 3, 5),
        torch.tensor([[1, 2], [3, 4]], device="cpu", dtype=torch.int64),
        (
            torch.tensor([3, 2], device="cpu", dtype=torch.int64),
            torch.tensor([1, 2], device="cpu", dtype=torch.int64),
        ),
    )
    tail = (label, *lengths, 0, None, 0, log_probs)
    assert torch.autograd.gradcheck(lambda x: ops.transducer_loss_forward(x, *tail)[0], x)
    with torch.autocast("cpu", BF16):
        assert ops.transducer_loss_forward(x.bfloat16(), *tail)[0].dtype == F32
    _, alpha, beta, normalizers = ops.transducer_loss_forward(x.detach(), *tail)
    kept = None if log_probs else normalizers
    saved = (label, *lengths, alpha, beta, kept, 0, None, not log_probs)
    gradient = ops.transducer_loss_backward(torch.ones(2, dtype=F64, device="cpu"), x, *saved)
    with pytest.raises(NotImplementedError, match="double backward"):
        gradient.sum().backward()


@pytest.mark.parametrize("silu", [False, True])
def test_group_norm(ops, silu):
    x, weight, bias = leaf(2, 4, 3), leaf(4, seed=2), leaf(4, seed=3)
    run = lambda *tensors: ops.group_norm_forward(tensors[0], 2, *tensors[1:], 0.5, silu)[0]  # noqa: E731
    assert torch.autograd.gradcheck(run, (x, weight, bias))
    assert torch.autograd.gradgradcheck(run, (x, weight, bias))


NORMS = {
    "group_norm": lambda op, x, w, b: op(x, 2, w, b, 0.5, True)[0],
    "layer_norm": lambda op, x, w, b: op(x, [4, 3], w.repeat(3, 1).T, b.repeat(3, 1).T, 0.5)[0],
}


@pytest.mark.parametrize("name", NORMS)
def test_a_recorded_gradient_is_the_plain_one(ops, name):
    """create_graph=True computes it by other ops, eps and all; gradgradcheck would look at those alone."""
    leaves = leaf(2, 4, 3), leaf(4, seed=2), leaf(4, seed=3)
    plain, recorded = (
        torch.autograd.grad(
            NORMS[name](getattr(ops, f"{name}_forward"), *leaves).square().sum(), leaves, create_graph=graph
        )
        for graph in (False, True)
    )
    for ours, theirs in zip(recorded, plain, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("only", [0, 1, 2])
def test_layer_norm_of_one_leaf(ops, only):
    """Where one of input, weight and bias wants a gradient, that one gets it."""
    tensors = [leaf(5, 6), leaf(6, seed=2), leaf(6, seed=3)]
    for i, tensor in enumerate(tensors):
        tensor.requires_grad_(i == only)
    assert torch.autograd.gradcheck(lambda x, w, b: ops.layer_norm_forward(x, [6], w, b, 0.5)[0], tensors)


class NoGradient(torch.autograd.Function):
    """Passes values on, and no gradient back."""

    @staticmethod
    def forward(ctx, input):
        return input.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


@pytest.mark.parametrize("binding", ["none", "loaded"])
def test_no_gradient_stays_none(ops, binding):
    """A loss whose gradient is absent, not zero, gives none, as torch's own losses do."""
    logits, labels = leaf(5, 7), torch.tensor([0, 1, 2, 3, 4], device="cpu", dtype=torch.int64)
    op = (ops if binding == "none" else torch.ops.apex).xentropy_forward
    NoGradient.apply(op(logits, labels, 0.1, 0, False)[0]).sum().backward()
    assert logits.grad is None
