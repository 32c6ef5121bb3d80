"""amp's O1 patches functions of torch that references call: these compute as if it did not."""

from __future__ import annotations

import amp_runs
import pytest
import torch
from op_calls import call_of
from torch.utils._pytree import tree_leaves

from apex import _loader
from apex._loader import reference, registry

_loader.load()


def results(name):
    """What the reference returns and writes."""
    call = call_of(name, torch.device("cpu"))
    found = getattr(torch.ops.apex_reference, name)(**call)
    return [t for t in tree_leaves((found, call)) if isinstance(t, torch.Tensor)]


@pytest.fixture
def patched():
    model = amp_runs.plain()
    amp_runs.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1")
    one = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    assert torch.mm(one, one).dtype == torch.float16


@pytest.mark.parametrize("name", list(registry.schemas()))
def test_same_bits_under_o1(name, request):
    wanted = results(name)
    request.getfixturevalue("patched")
    found = results(name)
    assert [t.dtype for t in found] == [t.dtype for t in wanted]
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b) or (a.isnan() == b.isnan()).all()


def test_gradients_of_gradients(patched):
    """The derivative of a backward op, too, where it is Python's."""
    names = [n for n in registry.schemas() if n.startswith("dense_") and "gelu" not in n]
    library = reference.define("apex_test_of_amp", reference.implementation, names)
    reference.record("apex_test_of_amp", library, names)
    x, w, b = (
        torch.randn(s, dtype=torch.float32, device="cpu").requires_grad_() for s in ((3, 4), (5, 4), (5,))
    )
    output, before = torch.ops.apex_test_of_amp.dense_forward(x, w, b, "gelu")
    assert output.dtype == torch.float32
    g = torch.ones_like(output).requires_grad_()
    gradient = torch.ops.apex_test_of_amp.dense_backward(g, x, w, b, before.detach(), "gelu")[0]
    (second,) = torch.autograd.grad(gradient.square().sum(), w)
    amp_runs.forget()
    again = torch.ops.apex.dense_backward(g, x, w, b, before.detach(), "gelu")[0]
    torch.testing.assert_close(second, torch.autograd.grad(again.square().sum(), w)[0])
    library._destroy()
