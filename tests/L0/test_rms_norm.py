"""How the norms' ops behave in torch: compiler, autocast, transforms, errors. By whatever serves them here."""

from __future__ import annotations

import subprocess
import sys

import norms
import pytest
import torch
from lists import BF16, F16, F32, F64
from loader.described import ROOT
from norms import LAYER, NORMS, RMS
from torch.library import opcheck

from apex._loader import bindings

bindings.load()
each_norm = pytest.mark.parametrize("norm", NORMS, ids=lambda n: n.name)


@each_norm
@pytest.mark.parametrize("memory_efficient", [False, True], ids=["input", "output"])
def test_opcheck(norm, memory_efficient):
    weights = norm.make((64,), F32, "cpu")
    x, r = (norms.random((3, 5, 64), F32, "cpu", seed=s).requires_grad_() for s in (1, 2))
    op = torch.ops.apex
    forward, add = getattr(op, f"{norm.name}_forward"), getattr(op, f"add_{norm.name}_forward")
    opcheck(forward, (x, (64,), *weights, norms.EPS, memory_efficient))
    opcheck(add, (x, r, (64,), *weights, norms.EPS, memory_efficient))
    detached = [w.detach() for w in weights]
    outputs = forward(x.detach(), (64,), *detached, norms.EPS)
    saved = outputs[0] if memory_efficient else x.detach()
    backward = getattr(op, f"{norm.name}_backward")
    opcheck(
        backward,
        (r.detach(), saved, *outputs[1:], (64,), *detached, norms.EPS, memory_efficient),
    )


@each_norm
def test_double_backward(norm):
    """As torch's own; refused in words where the input was not kept."""
    weights = norm.make((7,), F64, "cpu")
    x, r = (norms.random((3, 7), F64, "cpu", seed=s).requires_grad_() for s in (1, 2))
    assert torch.autograd.gradcheck(lambda x, *w: norm.forward(x, (7,), w), (x, *weights))
    assert torch.autograd.gradgradcheck(lambda x, *w: norm.forward(x, (7,), w), (x, *weights))
    assert torch.autograd.gradgradcheck(lambda x, r, *w: norm.add_forward(x, r, (7,), w), (x, r, *weights))
    y = norm.forward(x, (7,), weights, memory_efficient=True)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="memory_efficient=True does not keep"):
        first.sum().backward()


@each_norm
def test_transforms(norm):
    """torch.func.grad works; forward mode is refused, not silently zero."""
    x = norms.random((3, 8), F32, "cpu")
    found = torch.func.grad(lambda x: norm.forward(x, (8,), ()).square().sum())(x)
    wide = norms.leaf(x)
    (wanted,) = torch.autograd.grad(norm.exact(wide, (8,), ()).square().sum(), wide)
    norms.near(found, wanted)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: norm.forward(x, (8,), ()), (x,), (x,))


@each_norm
def test_usual_errors_of_autograd(norm):
    x = norms.random((3, 8), F32, "cpu").requires_grad_()
    y = norm.forward(x, (8,), ())
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
    z = x * 1.0
    y = norm.forward(z, (8,), ())
    z.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        y.sum().backward()


@each_norm
def test_checkpoint_and_saved_tensor_hooks(norm):
    from torch.utils.checkpoint import checkpoint

    x = norms.random((3, 8), F32, "cpu").requires_grad_()
    (plain,) = torch.autograd.grad(norm.forward(x, (8,), ()).square().sum(), x)
    y = checkpoint(lambda x: norm.forward(x, (8,), ()), x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], plain)
    with torch.autograd.graph.save_on_cpu():
        y = norm.forward(x, (8,), (), memory_efficient=True)
    norms.near(torch.autograd.grad(y.square().sum(), x)[0], plain.double())


@each_norm
def test_autocast(norm):
    """The output has autocast's dtype; float32 weights are read as they are and get float32 gradients."""
    weights = norm.make((16,), F32, "cpu")
    x = norms.random((3, 16), F32, "cpu")
    for source in (F32, BF16):
        for dtype in (BF16, F16):
            with torch.autocast("cpu", dtype):
                y = norm.forward(x.to(source), (16,), weights)
            assert y.dtype == dtype
            assert all(g.dtype == F32 for g in torch.autograd.grad(y.float().sum(), weights))
            norms.near(y, norm.exact(x.to(source).double(), (16,), [w.double() for w in weights]))
    with torch.autocast("cpu", BF16):
        assert norm.forward(x.double(), (16,), ()).dtype == F64


@each_norm
def test_meta_and_export(norm):
    y = norm.forward(torch.empty(3, 5, 16, dtype=F16, device="meta"), (16,), (), dtype=F32)
    assert y.device.type == "meta" and y.dtype == F32 and y.shape == (3, 5, 16)

    class Module(torch.nn.Module):
        def forward(self, x):
            return norm.forward(x, (16,), ())

    batch = torch.export.Dim("batch", min=2, max=1024)
    x = norms.random((4, 16), F32, "cpu")
    exported = torch.export.export(Module(), (x,), dynamic_shapes=({0: batch},))
    assert f"{norm.name}_forward" in exported.graph_module.code
    other = norms.random((7, 16), F32, "cpu", seed=9)
    assert torch.equal(exported.module()(other), Module()(other))


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda x: LAYER.forward(x, (7,), ()), ValueError, r"normalized_shape \[7\]"),
        (lambda x: LAYER.forward(x, (), ()), ValueError, "normalized_shape"),
        (lambda x: RMS.forward(x, (8,), (x[0, :4],)), ValueError, "weight has shape"),
        (lambda x: RMS.forward(x, (8,), (x[0].double(),)), TypeError, "float64 goes with float64"),
        (lambda x: RMS.forward(x.int(), (8,), ()), TypeError, "float32, float16, bfloat16"),
        (lambda x: RMS.add_forward(x, x[:1], (8,), ()), ValueError, "residual"),
        (lambda x: LAYER.forward(x, (8,), (x[0], x[0].half())), TypeError, "one dtype"),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call(norms.random((3, 8), F32, "cpu"))


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(shape=(4,)), "how the input's shape"),
        (dict(shape=(24,)), "how the input's shape"),
        (dict(shape=()), "normalized_shape"),
        (dict(weight=torch.ones(7, dtype=F32, device="cpu")), "weight has shape"),
        (dict(weight=torch.ones((), dtype=F32, device="cpu")), "weight has shape"),
        (dict(grad=torch.ones(3, 7, dtype=F32, device="cpu")), "the gradient has shape"),
        (dict(grad_sum=torch.ones(3, 1, dtype=F32, device="cpu")), "the gradient of the sum has shape"),
        (dict(rstd=torch.ones(2, dtype=F32, device="cpu")), "rstd must hold one"),
    ],
    ids=lambda p: "-".join(p) if isinstance(p, dict) else "",
)
@each_norm
def test_backward_refuses_what_no_forward_left(variant, norm, change, words):
    """Kernels read as many elements as the sizes say: past the end of what is shorter."""
    given = dict(
        grad=torch.ones(3, 8, dtype=F32, device="cpu"),
        grad_sum=None,
        rstd=torch.ones(3, dtype=F32, device="cpu"),
        shape=(8,),
        weight=torch.ones(8, dtype=F32, device="cpu"),
    )
    given = {
        k: v.to(variant.device) if isinstance(v, torch.Tensor) else v for k, v in (given | change).items()
    }
    mean = (torch.zeros(3, device=variant.device, dtype=F32),) if norm.centered else ()
    bias = (given["weight"],) if norm.centered else ()
    backward = getattr(torch.ops.apex, f"add_{norm.name}_backward")
    saved = torch.ones(3, 8, device=variant.device, dtype=F32)
    with pytest.raises(ValueError, match=words):
        backward(
            given["grad"], given["grad_sum"], saved, *mean, given["rstd"], given["shape"], given["weight"],
            *bias, norms.EPS,
        )  # fmt: skip


def test_backward_refuses_a_gradient_of_another_dtype():
    x, rstd = torch.ones(3, 8, dtype=F32, device="cpu"), torch.ones(3, dtype=F32, device="cpu")
    with pytest.raises(TypeError, match="the gradient of the sum has dtype"):
        torch.ops.apex.add_rms_norm_backward(x, x.half(), x, rstd, (8,), None, norms.EPS)


def test_without_bindings(tmp_path):
    """Where no binding fits this torch, the same ops are differentiable from Python."""
    code = """
import torch
from apex.normalization import FusedLayerNorm, FusedRMSNorm, fused_add_layer_norm
from apex._loader import bindings
assert not bindings.load().native
torch.manual_seed(0)
x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
for make in (FusedLayerNorm, FusedRMSNorm):
    module = make(8).double()
    assert torch.autograd.gradcheck(module, x) and torch.autograd.gradgradcheck(module, x)
    assert torch.autograd.gradcheck(make(8, elementwise_affine=False).double(), x)
    efficient = make(8, memory_efficient=True).double()
    assert torch.autograd.gradcheck(efficient, x)
    (first,) = torch.autograd.grad(efficient(x).sum(), x, create_graph=True)
    try:
        first.sum().backward()
        raise AssertionError
    except NotImplementedError as error:
        assert "does not keep" in str(error)
    single = make(8)
    with torch.autocast("cpu", torch.bfloat16):
        y = single(x.detach().float())
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and single.weight.grad.dtype == torch.float32
w, b = (torch.rand(8, dtype=torch.float64, requires_grad=True) for _ in range(2))
r = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
assert torch.autograd.gradcheck(fused_add_layer_norm, (x, r, w, b))
assert torch.autograd.gradgradcheck(fused_add_layer_norm, (x, r, w, b))
compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
torch.testing.assert_close(compiled(x), module(x))
print("done")
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "APEX_TREE": str(tmp_path), "PATH": "/usr/bin"},
    )
    assert done.stdout.strip().endswith("done"), done.stderr
