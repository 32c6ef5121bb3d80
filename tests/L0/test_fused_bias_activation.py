"""apex.transformer.functional's activations and fused_bias_swiglu, as users call them."""

from __future__ import annotations

import inspect

import activations
import lists
import pytest
import torch
import torch.nn.functional as F
from lists import BF16, F16, F32, F64

from apex._legacy import fused_bias_swiglu
from apex.transformer import functional

FUNCTIONS = {  # name -> activation, gated
    "fused_bias_swiglu": ("silu", True),
    "fused_bias_geglu": ("gelu", True),
    "fused_bias_quick_geglu": ("quick_gelu", True),
    "fused_bias_gelu": ("gelu", False),
    "fused_bias_quick_gelu": ("quick_gelu", False),
    "fused_bias_squared_relu": ("squared_relu", False),
}
each = pytest.mark.parametrize("name", FUNCTIONS)


@each
def test_functions(name):
    function, (activation, gated) = getattr(functional, name), FUNCTIONS[name]
    assert list(inspect.signature(function).parameters) == ["input", "bias"]
    x, bias, g = activations.inputs((3, 5, 16), F32, "cpu", F32, gated)
    wide = [t.detach().double().requires_grad_() for t in (x, bias)]
    expected = activations.exact(*wide, activation, gated)
    y = function(x, bias)
    activations.near(y, expected)
    found, wanted = torch.autograd.grad(y, (x, bias), g), torch.autograd.grad(expected, wide, g.double())
    activations.near(found[0], wanted[0])
    activations.near(found[1], wanted[1], rows=15)
    activations.near(function(x), activations.exact(wide[0], None, activation, gated))


@each
def test_as_exact_as_torch(name):
    """Against float64, no worse than torch's own ops in the same dtype, in the maximum and the root mean square."""
    function, (activation, gated) = getattr(functional, name), FUNCTIONS[name]
    for dtype in (F32, F16, BF16):
        x, bias, g = activations.inputs((256, 512), dtype, "cpu", dtype, gated)
        wide = [t.detach().double().requires_grad_() for t in (x, bias)]

        def everything(y, leaves, g=g):
            return [y, *torch.autograd.grad(y, leaves, g.to(y.dtype))]

        exact = everything(activations.exact(*wide, activation, gated), wide)
        ours = everything(function(x, bias), (x, bias))
        theirs = everything(activations.exact(x, bias, activation, gated), (x, bias))
        for a, b, e in zip(ours, theirs, exact, strict=True):
            own, other = (a.double() - e).abs(), (b.double() - e).abs()
            slack = 2 * lists.ROUNDING[F32] * max(1.0, e.abs().max().item())
            assert own.max() <= other.max() * 1.05 + slack
            assert own.square().mean().sqrt() <= other.square().mean().sqrt() * 1.05 + slack / 4


@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=str)
def test_legacy_functions(dtype):
    """Both functions of the module that public apex compiles; its own test's shape."""
    x, bias, g = activations.inputs((5, 64), dtype, "cpu", dtype, True)
    wide = [t.detach().double().requires_grad_() for t in (x, bias)]
    expected = activations.exact(*wide, "silu", True)
    y = fused_bias_swiglu.forward(x, bias)
    assert not y.requires_grad
    activations.near(y, expected)
    activations.near(
        fused_bias_swiglu.backward(g, x, bias), torch.autograd.grad(expected, wide[0], g.double())[0]
    )


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_autocast_after_linear(dtype):
    """A half input meets a float32 bias; the bias's gradient is float32."""
    linear, bias = (
        torch.nn.Linear(16, 32, bias=False, dtype=F32, device="cpu"),
        torch.nn.Parameter(torch.ones(32, dtype=F32, device="cpu")),
    )
    with torch.autocast("cpu", dtype):
        y = functional.fused_bias_swiglu(linear(torch.ones(4, 16, dtype=F32, device="cpu")), bias)
    assert y.dtype == dtype
    y.float().sum().backward()
    assert bias.grad.dtype == F32 and linear.weight.grad.dtype == F32


@each
def test_linear_activation_linear(name):
    """Report: dense, gelu, dense does not match linear, gelu, linear. Here to the form that the documentation names."""
    function, (activation, gated) = getattr(functional, name), FUNCTIONS[name]
    torch.manual_seed(0)
    first, second = (
        torch.nn.Linear(*sizes, dtype=F32, device="cpu")
        for sizes in ((128, 132), (66 if gated else 132, 128))
    )
    x = torch.randn(10, 50, 128, dtype=F32, device="cpu")
    ours = second(function(F.linear(x, first.weight), first.bias))
    theirs = second(activations.exact(first(x), None, activation, gated))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    leaves = [first.weight, first.bias, second.weight]
    for a, b in zip(
        torch.autograd.grad(ours.sum(), leaves), torch.autograd.grad(theirs.sum(), leaves), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-3)


@each
def test_compile_fullgraph(name):
    """One graph for every batch, equal to eager; export works."""
    from torch._dynamo.testing import CompileCounterWithBackend

    function, (_, gated) = getattr(functional, name), FUNCTIONS[name]

    class Block(torch.nn.Module):
        def forward(self, x, bias):
            return function(x * 2, bias) + 1

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(Block(), fullgraph=True, dynamic=True, backend=counter)
    compiled(*activations.inputs((4, 16), BF16, "cpu", F32, gated)[:2])
    once = counter.frame_count
    for rows in (3, 9):
        x, bias, _ = activations.inputs((rows, 16), BF16, "cpu", F32, gated)
        ours, eager = compiled(x, bias), Block()(x, bias)
        lists.assert_same_bits([ours], [eager])
        lists.assert_same_bits(
            torch.autograd.grad(ours.sum(), (x, bias)), torch.autograd.grad(eager.sum(), (x, bias))
        )
    assert counter.frame_count == once
    exported = torch.export.export(Block(), (x, bias))
    assert torch.equal(exported.module()(x, bias), Block()(x, bias))


def test_transforms():
    """torch.func.grad works; forward mode is refused, not silently zero."""
    x, bias, _ = (t.detach() for t in activations.inputs((3, 8), F32, "cpu", F32, True))
    found = torch.func.grad(lambda x: functional.fused_bias_swiglu(x, bias).sum())(x)
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(
        found,
        torch.autograd.grad(activations.exact(leaf, bias, "silu", True).sum(), leaf)[0],
        rtol=1e-5,
        atol=1e-5,
    )
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: functional.fused_bias_swiglu(x, bias), (x,), (x,))


def test_without_bindings():
    """The reference, registered from Python, gives the same values and gradients of gradients."""
    from apex._loader import reference

    names = ["bias_activation_forward", "bias_activation_backward"]
    library = reference.define("apex_activation_test", reference.implementation, names)
    reference.record("apex_activation_test", library, names)
    for activation, gated in FUNCTIONS.values():
        for bias_dtype in (F64, None):
            x, bias, g = activations.inputs((3, 4), F64, "cpu", bias_dtype, gated, scale=1.0)

            def run(x, *bias, activation=activation, gated=gated):
                return torch.ops.apex_activation_test.bias_activation_forward(
                    x, *(bias or (None,)), activation, gated
                )

            leaves = (x,) if bias is None else (x, bias)
            torch.testing.assert_close(
                run(*leaves), torch.ops.apex.bias_activation_forward(x, bias, activation, gated)
            )
            assert torch.autograd.gradcheck(run, leaves)
            # The backward of this namespace's op is that of the product's.
            found = torch.ops.apex_activation_test.bias_activation_backward(g, x, bias, activation, gated)
            wanted = torch.ops.apex.bias_activation_backward(g, x, bias, activation, gated)
            v = torch.ones_like(x)
            for a, b in zip(
                torch.autograd.grad(found[0], leaves, v),
                torch.autograd.grad(wanted[0], leaves, v),
                strict=True,
            ):
                torch.testing.assert_close(a, b)
            with torch.autocast("cpu", BF16):
                assert run(*leaves).dtype == F64
