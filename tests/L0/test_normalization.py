"""apex.normalization, apex.contrib.layer_norm, apex.transformer.layers and the legacy modules, as users call them."""

from __future__ import annotations

import norms
import pytest
import torch
import torch.nn.functional as F
from lists import BF16, F16, F32, F64
from torch_defaults import float32_on_cpu

from apex import normalization
from apex._legacy import fast_layer_norm, fused_layer_norm_cuda
from apex.contrib import layer_norm
from apex.contrib.layer_norm.layer_norm import FastLayerNormFN
from apex.normalization import fused_layer_norm as functions
from apex.transformer import layers
from tests.L0.signatures import signature


def of_float32(name, package=normalization):
    """Makes such a module of float32 on the CPU: parameters follow torch's defaults, as those of torch.nn do."""
    return float32_on_cpu()(getattr(package, name))


FastLayerNorm = of_float32("FastLayerNorm", layer_norm)
MODULES = [of_float32("FusedLayerNorm"), of_float32("FusedRMSNorm"), FastLayerNorm]
MIXED = [of_float32("MixedFusedLayerNorm"), of_float32("MixedFusedRMSNorm")]


def like_torch(module, x):
    """What torch gives for the module's weights, and its gradients for a gradient of ones."""
    eps = getattr(module, "eps", None) or module.epsilon
    bias = getattr(module, "bias", None)
    shape = tuple(getattr(module, "normalized_shape", x.shape[-1:]))
    if "RMS" in type(module).__name__:
        return F.rms_norm(x, shape, module.weight, eps)
    return F.layer_norm(x, shape, module.weight, bias, eps)


@pytest.mark.parametrize("make", MODULES, ids=lambda m: m.__name__)
@pytest.mark.parametrize("memory_efficient", [False, True], ids=["input", "output"])
def test_modules_match_torch(variant, make, memory_efficient):
    """On CPU tensors too (report: having apex installed changed what CPU tensors gave)."""
    module = make(72, memory_efficient=memory_efficient).to(variant.device)
    x = norms.random((5, 72), F32, variant.device).requires_grad_()
    leaves = [x, *module.parameters()]
    ours = torch.autograd.grad(module(x).square().sum(), leaves)
    theirs = torch.autograd.grad(like_torch(module, x).square().sum(), leaves)
    torch.testing.assert_close(module(x), like_torch(module, x), rtol=1e-5, atol=1e-5)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", MODULES, ids=lambda m: m.__name__)
@pytest.mark.parametrize("tiny", [1e-30, -1e-30, 1e-7, 0.0])
def test_weights_nearer_to_0_than_eps(variant, make, tiny):
    """From the output, they count as eps: documented, as public apex. From the input their gradients are whole."""
    eps, rows = 2.0**-16, 5
    x, dy = (norms.random((rows, 72), F32, variant.device, seed=seed) for seed in (1, 2))
    for memory_efficient in (False, True):
        module = make(72, eps=eps, memory_efficient=memory_efficient).to(variant.device)
        with torch.no_grad():
            module.weight[7] = tiny
        weight_grad = (
            torch.autograd.grad(module(x.clone().requires_grad_()), module.weight, dy)[0].double().cpu()
        )
        exact = x.double().cpu()
        if "RMS" not in make.__name__:
            exact = exact - exact.mean(-1, keepdim=True)
        normalized = exact * (exact.square().mean(-1, keepdim=True) + eps).rsqrt()
        whole = (dy.double().cpu() * normalized).sum(0)
        if memory_efficient:
            whole[7] *= abs(tiny) / eps
        torch.testing.assert_close(weight_grad, whole, rtol=1e-5, atol=1e-5)
        assert not memory_efficient or abs(weight_grad[7] - whole[7]) <= 1e-4 * abs(whole[7])


def test_no_weights():
    """Report: non-affine layer norm errors in a later op."""
    for make in MODULES[:2]:
        module = make(64, elementwise_affine=False)
        assert not list(module.parameters()) and "elementwise_affine=False" in repr(module)
        x = norms.random((3, 64), F32, "cpu").requires_grad_()
        (found,) = torch.autograd.grad((module(x) + 1).square().sum(), x)
        (wanted,) = torch.autograd.grad((like_torch(module, x) + 1).square().sum(), x)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_mixed_dtypes_have_a_rule():
    """Report: float32 input, half weight. Outside autocast it is refused by name; Mixed* take it."""
    x = norms.random((2, 8, 512), F32, "cpu")
    for kind in ("LayerNorm", "RMSNorm"):
        plain = of_float32(f"Fused{kind}")(512).half()
        with pytest.raises(TypeError, match=f"MixedFused{kind}"):
            plain(x)
        with pytest.raises(TypeError, match=f"MixedFused{kind}"):
            plain.to("meta")(x.to("meta"))  # which has no autocast
        mixed = of_float32(f"MixedFused{kind}")(512).half()
        assert mixed(x).dtype == F16
        assert of_float32(f"MixedFused{kind}")(512)(x.to(BF16)).dtype == F32
        with pytest.raises(RuntimeError, match="elementwise_affine = False"), pytest.warns(UserWarning):
            of_float32(f"MixedFused{kind}")(512, elementwise_affine=False)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_autocast_after_linear(dtype):
    """Report: half input with a float32 weight was rejected."""
    for make in [*MODULES, *MIXED]:
        linear, module = torch.nn.Linear(64, 64, dtype=F32, device="cpu"), make(64)
        with torch.autocast("cpu", dtype):
            y = module(linear(norms.random((4, 64), F32, "cpu")))
        assert y.dtype == dtype
        y.float().sum().backward()
        assert module.weight.grad.dtype == F32 and linear.weight.grad.dtype == F32


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_half_input_with_float32_weights(dtype):
    """Report: half input with a float32 weight was rejected. Without autocast too: amp's O1 casts the linear layers."""
    for make in MODULES:
        module = make(64)
        x = norms.random((4, 64), dtype, "cpu").requires_grad_()
        y = module(x)
        assert y.dtype == (F32 if make is FastLayerNorm else dtype)
        found = torch.autograd.grad(y.float().square().sum(), [x, *module.parameters()])
        assert [g.dtype for g in found] == [dtype, *([F32] * (len(found) - 1))]
        near = dict(rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)
        torch.testing.assert_close(y.float(), like_torch(module, x.float()), **near)


def test_parameters_that_moved():
    """FSDP and parametrizations take a parameter out of the module's own table; the attribute is then what counts."""
    for make in MODULES:
        module, twin = make(8), make(8)
        x = norms.random((3, 8), F32, "cpu")
        torch.nn.utils.parametrize.register_parametrization(module, "weight", torch.nn.Identity())
        with torch.no_grad():
            module.parametrizations.weight.original.fill_(2.0)
            twin.weight.fill_(2.0)
        assert torch.equal(module(x), twin(x))
        weight = twin.weight.detach() * 2
        del twin.weight
        twin.weight = weight
        assert torch.equal(twin(x), 2 * module(x))


class Block(torch.nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.first, self.second = (
            torch.nn.Linear(64, 64, dtype=F32, device="cpu"),
            torch.nn.Linear(64, 64, dtype=F32, device="cpu"),
        )
        self.norm = norm

    def forward(self, x):
        return self.second(self.norm(x + F.dropout(self.first(x), 0.0)))


@pytest.mark.parametrize("make", MODULES, ids=lambda m: m.__name__)
def test_compile_fullgraph(make):
    """Report: torch.compile splits the graph at the norm. One graph, two batch sizes, equal to eager."""
    from torch._dynamo.testing import CompileCounterWithBackend

    block = Block(make(64)).bfloat16()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    compiled(norms.random((4, 64), BF16, "cpu").requires_grad_())
    once = counter.frame_count
    for batch in (4, 9):
        x = norms.random((batch, 64), BF16, "cpu").requires_grad_()
        ours = torch.autograd.grad(compiled(x).sum(), [x, *block.parameters()])
        eager = torch.autograd.grad(block(x).sum(), [x, *block.parameters()])
        for a, b in zip(ours, eager, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    assert counter.frame_count == once


SIGNATURES = {
    "FusedLayerNormAffineFunction": "(ctx, input, weight, bias, normalized_shape, eps, memory_efficient=False)",
    "FusedRMSNormAffineFunction": "(ctx, input, weight, normalized_shape, eps, memory_efficient=False)",
    "FusedLayerNormAffineMixedDtypesFunction": (
        "(ctx, input, weight, bias, normalized_shape, eps, memory_efficient=False)"
    ),
    "FusedRMSNormAffineMixedDtypesFunction": (
        "(ctx, input, weight, normalized_shape, eps, memory_efficient=False)"
    ),
    "FusedLayerNormFunction": "(ctx, input, normalized_shape, eps, memory_efficient=False)",
    "FusedRMSNormFunction": "(ctx, input, normalized_shape, eps, memory_efficient=False)",
    "fused_layer_norm_affine": "(input, weight, bias, normalized_shape, eps=1e-06, memory_efficient=False)",
    "fused_layer_norm": "(input, normalized_shape, eps=1e-06, memory_efficient=False)",
    "mixed_dtype_fused_layer_norm_affine": (
        "(input, weight, bias, normalized_shape, eps=1e-06, memory_efficient=False)"
    ),
    "fused_rms_norm_affine": "(input, weight, normalized_shape, eps=1e-06, memory_efficient=False)",
    "fused_rms_norm": "(input, normalized_shape, eps=1e-06, memory_efficient=False)",
    "mixed_dtype_fused_rms_norm_affine": "(input, weight, normalized_shape, eps=1e-06, memory_efficient=False)",
    "manual_rms_norm": "(input, normalized_shape, weight, eps)",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_public_signatures(name):
    """Report: a new positional argument broke downstream callers."""
    found = getattr(functions, name)
    assert signature(getattr(found, "forward", found)) == SIGNATURES[name]


def test_functions_take_the_old_arguments_and_the_new_one():
    x, w, b = (
        norms.random((3, 8), F32, "cpu"),
        torch.rand(8, dtype=F32, device="cpu"),
        torch.rand(8, dtype=F32, device="cpu"),
    )
    layer, rms = functions.FusedLayerNormAffineFunction, functions.FusedRMSNormAffineFunction
    assert torch.equal(layer.apply(x, w, b, (8,), 1e-5), layer.apply(x, w, b, (8,), 1e-5, True))
    assert torch.equal(rms.apply(x, w, torch.Size([8]), 1e-5), rms.apply(x, w, 8, 1e-5, True))
    assert torch.equal(FastLayerNormFN.apply(x, w, b, 1e-5), layer.apply(x, w, b, (8,), 1e-5))
    torch.testing.assert_close(functions.manual_rms_norm(x, (8,), w, 1e-5), rms.apply(x, w, (8,), 1e-5))


def test_state_of_torch_fits():
    ours, theirs = MODULES[0]((3, 8)), torch.nn.LayerNorm((3, 8), dtype=F32, device="cpu")
    ours.load_state_dict(theirs.state_dict())
    assert repr(ours) == "FusedLayerNorm((3, 8), eps=1e-05, elementwise_affine=True)"
    assert torch.jit.trace(ours, norms.random((2, 3, 8), F32, "cpu")).graph.findNode("aten::layer_norm")


@pytest.mark.parametrize("how", ["script", "trace"])
@pytest.mark.filterwarnings("ignore")  # torch's own, of deprecations
def test_torchscript(how):
    """As in public apex: torch's own ops, which run where no apex is. Dtypes are as in eager mode."""
    for kind, mixed in (("LayerNorm", False), ("RMSNorm", False), ("LayerNorm", True), ("RMSNorm", True)):
        make = of_float32(f"{'Mixed' * mixed}Fused{kind}")
        plain = () if mixed else (make((3, 8), elementwise_affine=False),)
        for module in (make((3, 8)), make((3, 8), eps=0.1, memory_efficient=True), *plain):
            for parameter in module.parameters():
                torch.nn.init.normal_(parameter)
            for weights, dtype in ((F32, F32), (F32, BF16), (F16, F16), (F64, F64)):
                module, x = module.to(weights), norms.random((2, 3, 8), dtype, "cpu")
                inside = torch.nn.Sequential(module)
                made = torch.jit.script(inside) if how == "script" else torch.jit.trace(inside, x)
                assert "apex::" not in str(made.inlined_graph)
                expected = module(x)
                assert made(x).dtype == expected.dtype
                near = 4 * torch.finfo(min((dtype, weights), key=lambda d: d.itemsize)).eps
                torch.testing.assert_close(made(x), expected, rtol=near, atol=4 * near)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_traces_take_sizes_from_tensors():
    """In a trace of torch.jit a size is a tensor, which torch's own layer norm takes."""
    x, w = norms.random((4, 8), F32, "cpu"), norms.random((8,), F32, "cpu", seed=2)
    for function in (
        lambda x: functions.fused_layer_norm(x, x.shape[-1:]),
        lambda x: functions.fused_rms_norm(x, x.size(-1)),
        lambda x: functions.fused_layer_norm_affine(x, w, w, w.shape),
        lambda x: functions.fused_rms_norm_affine(x, w, [x.shape[1]]),
        lambda x: normalization.fused_add_layer_norm(x, x, w, w)[0],
        lambda x: normalization.fused_add_rms_norm(x, x, w)[0],
        FastLayerNorm(8),
        float32_on_cpu()(layers.FastLayerNorm)(8),
    ):
        traced = torch.jit.trace(function, x)
        assert "apex::" in str(traced.inlined_graph)
        other = norms.random((7, 8), F32, "cpu", seed=3)
        assert torch.equal(traced(other), function(other))


def test_residual_functions():
    x, r, w, b = (norms.random(s, F32, "cpu", seed=i) for i, s in enumerate([(4, 8), (4, 8), (8,), (8,)]))
    y, total = normalization.fused_add_layer_norm(x, r, w, b)
    assert torch.equal(total, x + r)
    torch.testing.assert_close(y, F.layer_norm(total, (8,), w, b))
    y, total = normalization.fused_add_rms_norm(x, r, normalized_shape=(8,))
    torch.testing.assert_close(y, F.rms_norm(total, (8,), eps=1e-5))


@pytest.mark.parametrize("function", ["fused_add_layer_norm", "fused_add_rms_norm"])
def test_a_residual_function_without_weight_and_shape_is_refused(function):
    x = torch.ones(2, 8, dtype=F32, device="cpu")
    with pytest.raises(ValueError, match=f"{function}: without a weight normalized_shape says"):
        getattr(normalization, function)(x, x)


def test_layers_say_whether_they_are_sequence_parallel():
    for make in (layers.FusedLayerNorm, layers.MixedFusedLayerNorm, layers.FastLayerNorm):
        for enabled in (False, True):
            module = float32_on_cpu()(make)(16, sequence_parallel_enabled=enabled)
            assert module.sequence_parallel_enabled is enabled
            assert module.weight.sequence_parallel_enabled is enabled
            assert module.bias.sequence_parallel_enabled is enabled
        assert module(torch.ones(2, 16, dtype=F32, device="cpu")).shape == (2, 16)


@pytest.mark.parametrize("memory_efficient", [False, True], ids=["input", "output"])
def test_fused_layer_norm_cuda(memory_efficient):
    """Every function of the legacy module against autograd."""
    m, shape, eps = fused_layer_norm_cuda, (24,), 1e-5
    x = norms.random((5, 24), F64, "cpu").requires_grad_()
    w, b = (t.requires_grad_() for t in norms.LAYER.make(shape, F64, "cpu"))
    g = norms.random((5, 24), F64, "cpu", seed=5)

    y, mean, invvar = m.forward_affine(x, shape, w, b, eps)
    expected = F.layer_norm(x, shape, w, b, eps)
    torch.testing.assert_close(y, expected)
    assert mean.shape == invvar.shape == (5,) and not y.requires_grad
    saved = y if memory_efficient else x
    found = m.backward_affine(
        g, None if memory_efficient else mean, invvar, saved, shape, w, b, eps, memory_efficient
    )
    for a, wanted in zip(found, torch.autograd.grad(expected, (x, w, b), g), strict=True):
        torch.testing.assert_close(a, wanted)

    y, mean, invvar = m.forward(x, shape, eps)
    expected = F.layer_norm(x, shape, eps=eps)
    torch.testing.assert_close(y, expected)
    found = m.backward(g, mean, invvar, y if memory_efficient else x, shape, eps, memory_efficient)
    torch.testing.assert_close(found, torch.autograd.grad(expected, x, g)[0])

    y, invvar = m.rms_forward_affine(x, shape, w, eps)
    expected = F.rms_norm(x, shape, w, eps)
    torch.testing.assert_close(y, expected)
    found = m.rms_backward_affine(g, invvar, y if memory_efficient else x, shape, w, eps, memory_efficient)
    for a, wanted in zip(found, torch.autograd.grad(expected, (x, w), g), strict=True):
        torch.testing.assert_close(a, wanted)

    y, invvar = m.rms_forward(x, shape, eps)
    expected = F.rms_norm(x, shape, eps=eps)
    torch.testing.assert_close(y, expected)
    found = m.rms_backward(g, invvar, y if memory_efficient else x, shape, eps, memory_efficient)
    torch.testing.assert_close(found, torch.autograd.grad(expected, x, g)[0])

    assert m.forward_affine_mixed_dtypes(x.float(), shape, w.half(), b.half(), eps)[0].dtype == F16
    assert m.rms_forward_affine_mixed_dtypes(x.bfloat16(), shape, w.float(), eps)[0].dtype == F32


@pytest.mark.parametrize("memory_efficient", [False, True], ids=["input", "output"])
@pytest.mark.parametrize("half", [F16, BF16], ids=str)
def test_fast_layer_norm_has_the_weights_dtype(variant, memory_efficient, half):
    """float32 rows and half weights, one of public apex's combinations: the output is half too."""
    x = norms.random((5, 72), F32, variant.device).requires_grad_()
    w, b = (t.requires_grad_() for t in norms.LAYER.make((72,), half, variant.device))
    z, mu, rsigma = fast_layer_norm.ln_fwd(x, w, b, 1e-5)
    own = FastLayerNormFN.apply(x, w, b, 1e-5, memory_efficient)
    assert z.dtype == own.dtype == half and mu.dtype == rsigma.dtype == F32
    assert torch.equal(z, own)
    expected = F.layer_norm(x, (72,), w.float(), b.float())
    torch.testing.assert_close(own.float(), expected, rtol=2**-8, atol=2**-8)
    g = norms.random((5, 72), half, variant.device, seed=5)
    dx, dw, db, *_ = fast_layer_norm.ln_bwd(
        g, z if memory_efficient else x, mu, rsigma, w, b, memory_efficient
    )
    assert dx.dtype == (half if memory_efficient else F32)
    wanted = torch.autograd.grad(expected, (x, w, b), g.float())
    for found, theirs, autograd in zip(
        (dx, dw, db), wanted, torch.autograd.grad(own, (x, w, b), g), strict=True
    ):
        # What a row was is known to half precision only, where its output was saved.
        torch.testing.assert_close(
            found.float(), theirs.float(), rtol=0.02, atol=0.1 if memory_efficient else 0.02
        )
        torch.testing.assert_close(autograd.float(), theirs.float(), rtol=0.02, atol=0.1)


def test_fast_layer_norm():
    x = norms.random((5, 24), F64, "cpu").requires_grad_()
    w, b = norms.LAYER.make((24,), F64, "cpu")
    g = norms.random((5, 24), F64, "cpu", seed=5)
    z, mu, rsigma = fast_layer_norm.ln_fwd(x, w, b, 1e-5)
    expected = F.layer_norm(x, (24,), w, b, 1e-5)
    torch.testing.assert_close(z, expected)
    wanted = torch.autograd.grad(expected, (x, w, b), g)
    for found in (
        fast_layer_norm.ln_bwd(g, x, mu, rsigma, w),
        fast_layer_norm.ln_bwd(g, z, None, rsigma, w, b, True),
    ):
        assert len(found) == 5
        for a, e in zip(found, wanted, strict=False):
            torch.testing.assert_close(a, e)
    with pytest.raises(ValueError, match="needs beta"):
        fast_layer_norm.ln_bwd(g, z, None, rsigma, w, memory_efficient=True)
