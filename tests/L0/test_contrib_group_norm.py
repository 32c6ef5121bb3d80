"""GroupNorm, its functions and the legacy modules as users call them, and what torch does around the op."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lists import BF16, F16, F32, F64
from test_group_norm import EPS, channels_last, make, run
from torch_defaults import float32_on_cpu

from apex._legacy import group_norm_cuda, group_norm_v2_cuda
from apex.contrib.group_norm import GroupNorm
from apex.contrib.group_norm import group_norm as functions
from tests.L0.signatures import signature

opcheck = torch.library.opcheck
PUBLIC = [
    functions.cuda_group_norm_nhwc_one_pass,
    functions.cuda_group_norm_nhwc_two_pass,
    functions.cuda_group_norm_v2_nhwc,
]


def reference(x, groups, weight, bias, silu):
    """torch's own, in float32 or float64."""
    y = F.group_norm(x, groups, weight, bias, EPS)
    return F.silu(y) if silu else y


def test_public_signatures():
    for function in PUBLIC:
        assert signature(function) == "(x, G, weight, bias, eps, act=None)"
    wanted = "(x, G, weight, bias, eps, act=None, passes=1, use_group_norm_v2=False)"
    assert signature(functions.group_norm_nhwc_fprop) == wanted
    assert signature(functions.group_norm_nhwc_bprop) == wanted.replace("(x", "(grad_output, sums, x")
    wanted = "(num_groups, num_channels, eps=1e-05, affine=True, device=None, dtype=None, act=None)"
    assert signature(GroupNorm) == wanted
    wanted = "(input, groups, weight, bias, eps, passes, with_swish=False)"
    assert signature(group_norm_cuda.forward) == wanted
    assert signature(group_norm_cuda.backward) == wanted.replace("(input", "(grad_output, sums, input")
    wanted = "(x, w, b, eps, silu, num_groups, mean_var_out=None, sm_margin=0)"
    assert signature(group_norm_v2_cuda.gn) == wanted
    wanted = "(grad_output, x, w, b, mean_var, eps, silu, num_groups, sm_margin=0)"
    assert signature(group_norm_v2_cuda.gn_bwd) == wanted


@pytest.mark.parametrize("act", [None, "", "silu", "swish", "SiLU"])
def test_module_matches_torch(variant, act):
    """Also with counts of channels and groups that public apex has no kernels for."""
    for groups, channels in ((32, 128), (3, 21)):
        module = GroupNorm(groups, channels, eps=EPS, act=act, device=variant.device, dtype=F32)
        with torch.no_grad():
            module.weight.uniform_(0.5, 1.5)
            module.bias.normal_()
        for last in (False, True):
            x = make((2, channels, 3, 3), F32, variant.device, last)[0]
            leaves = [x, *module.parameters()]
            y, expected = module(x), reference(x, groups, module.weight, module.bias, bool(act))
            torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
            ours, theirs = (torch.autograd.grad(t.square().sum(), leaves) for t in (y, expected))
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_module_like_torchs():
    """Its state, its text, its refusals; and no weights."""
    ours, theirs = (make(4, 8, dtype=F32, device="cpu") for make in (GroupNorm, torch.nn.GroupNorm))
    theirs.load_state_dict(ours.state_dict())
    assert repr(ours).startswith("GroupNorm(4, 8, eps=1e-05, affine=True)")
    assert "act=silu" in repr(GroupNorm(4, 8, act="SiLU"))
    plain = GroupNorm(4, 8, affine=False)
    x = torch.randn(2, 8, 5, dtype=F32, device="cpu")
    assert not list(plain.parameters())
    torch.testing.assert_close(plain(x), F.group_norm(x, 4))
    assert GroupNorm(4, 8, dtype=F16).weight.dtype == F16
    for count in (1, 7, 320):
        assert count in GroupNorm.SUPPORTED_CHANNELS and count in GroupNorm.SUPPORTED_GROUPS
    assert (F16, BF16) in GroupNorm.SUPPORTED_DTYPES
    with pytest.raises(ValueError, match="num_channels must be divisible by num_groups"):
        GroupNorm(3, 8)
    with pytest.raises(ValueError, match="act must be"):
        GroupNorm(4, 8, act="gelu")
    with pytest.raises(ValueError, match="weight has shape"):
        ours(torch.randn(2, 12, 5, dtype=F32, device="cpu"))


def test_a_script_for_public_apex(variant):
    """An epilogue of a diffusion model's block, half, channels last, trained one step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 64, 3, padding=1, dtype=BF16, device="cpu"),
        GroupNorm(16, 64, act="swish", dtype=F32, device="cpu"),
    )
    model.to(variant.device).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 4, 4, device=variant.device, dtype=BF16).to(memory_format=torch.channels_last)
    y = model(x)
    assert y.dtype == BF16 and y.is_contiguous(memory_format=torch.channels_last)
    y.float().square().mean().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.parameters())
    assert model[1].weight.grad.dtype == F32


@pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f.__name__)
def test_functions(variant, function):
    x, w, b = make((2, 32, 4, 4), BF16, variant.device, weight=F32)
    y = function(x, 16, w, b, EPS, "silu")
    assert torch.equal(y, run(x, 16, w, b, True)) and torch.equal(
        function(x, 16, w, b, EPS), run(x, 16, w, b)
    )
    gradients = torch.autograd.grad(y, (x, w, b), torch.ones_like(y))
    assert [g.dtype for g in gradients] == [BF16, F32, F32]
    torch.testing.assert_close(y, functions.torch_group_norm(x, 16, w, b, EPS, "silu"), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
def test_sums_and_bprop(variant, v2):
    """What public apex's forward saves: mean and mean of squares, or mean and variance. The backward takes it."""
    x, w, b = make((2, 32, 4, 4), F32, variant.device)
    y, sums = functions.group_norm_nhwc_fprop(x, 16, w, b, EPS, "silu", 2, v2)
    assert sums.shape == (2 * 2 * 16,) and sums.dtype == F32 and not sums.requires_grad
    groups = x.detach().reshape(2, 16, -1)
    second = groups.var(2, unbiased=False) if v2 else groups.square().mean(2)
    wanted = torch.stack((groups.mean(2), second), -1).reshape(-1)
    torch.testing.assert_close(sums, wanted, rtol=1e-4, atol=1e-5)
    dy = torch.ones_like(y)
    found = functions.group_norm_nhwc_bprop(
        dy, sums, x.detach(), 16, w.detach(), b.detach(), EPS, "silu", 1, v2
    )
    for a, e in zip(found, torch.autograd.grad(y, (x, w, b), dy), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="passes must be 1 or 2, not 3"):
        functions.group_norm_nhwc_fprop(x, 16, w, b, EPS, "silu", 3)
    with pytest.raises(ValueError, match="act must be"):
        functions.group_norm_nhwc_fprop(x, 16, w, b, EPS, "relu")


def test_legacy_modules(variant):
    """Every function of both, in their argument order."""
    x, w, b = (t.detach() for t in make((2, 32, 4, 4), BF16, variant.device))
    leaves = [t.clone(memory_format=torch.preserve_format).requires_grad_() for t in (x, w, b)]
    expected = run(leaves[0], 16, *leaves[1:], True)
    wanted = torch.autograd.grad(expected, leaves, torch.ones_like(x))
    y, sums = group_norm_cuda.forward(x, 16, w, b, EPS, 1, True)
    gradients = group_norm_cuda.backward(torch.ones_like(x), sums, x, 16, w, b, EPS, 2, True)
    assert torch.equal(y, expected) and isinstance(gradients, list)
    mean_var = torch.empty(2 * 2 * 16, device=x.device, dtype=F32)
    out = group_norm_v2_cuda.gn(x, w, b, EPS, True, 16, mean_var_out=mean_var, sm_margin=4)
    assert torch.equal(out, expected) and torch.equal(group_norm_v2_cuda.gn(x, w, b, EPS, True, 16), expected)
    others = group_norm_v2_cuda.gn_bwd(torch.ones_like(x), x, w, b, mean_var, EPS, True, 16)
    for found in (gradients, others):
        for a, e in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, e, rtol=2e-2, atol=2e-2)
    assert not group_norm_cuda.forward(leaves[0], 16, *leaves[1:], EPS, 1)[0].requires_grad
    with pytest.raises(ValueError, match="mean_var_out must be float32 with 64 elements"):
        group_norm_v2_cuda.gn(x, w, b, EPS, True, 16, mean_var.half())
    with pytest.raises(ValueError, match="passes must be 1 or 2"):
        group_norm_cuda.forward(x, 16, w, b, EPS, 0)


@pytest.mark.parametrize("silu", [False, True])
def test_double_backward(variant, silu):
    variant.mixed = True  # second derivatives are torch's own ops
    x, w, b = make((2, 4, 3, 2), F64, variant.device)
    for inputs in ((x, w, b), (x,)):

        def function(x, w=None, b=None):
            return run(x, 2, w, b, silu)

        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


def test_torch_func():
    x, w, b = (t.detach() for t in make((2, 4, 3, 3), F64, "cpu"))
    found = torch.func.grad(lambda x: run(x, 2, w, b, True).square().sum())(x)
    twin = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(reference(twin, 2, w, b, True).square().sum(), twin)
    torch.testing.assert_close(found, wanted)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: run(x, 2, w, b), (x,), (x,))


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_opcheck(last):
    forward, backward = torch.ops.apex.group_norm_forward.default, torch.ops.apex.group_norm_backward.default
    for shape in ((2, 8, 3, 3), (2, 8, 5), (2, 8)):
        x, w, b = make(shape, BF16, "cpu", last, weight=F32)
        opcheck(forward, (x, 4, w, b, EPS, True))
        x, w, b = x.detach(), w.detach(), b.detach()
        opcheck(forward, (x, 4))
        y, mean, rstd = forward(x, 4, w, b, EPS, True)
        opcheck(backward, (y, x, mean, rstd, 4, w, b, EPS, True))
        opcheck(backward, (y, x, mean, rstd, 4, None, None, EPS))


class Block(torch.nn.Module):
    @float32_on_cpu()
    def __init__(self):
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, 8, 3), GroupNorm(4, 8, act="silu")

    def forward(self, x):
        return self.norm(self.conv(x))


class Scaled(torch.nn.Module):
    @float32_on_cpu()
    def __init__(self):
        super().__init__()
        self.scale, self.norm = (
            torch.nn.Parameter(torch.rand(8, 1, 1, dtype=F32, device="cpu")),
            GroupNorm(4, 8, act="silu"),
        )

    def forward(self, x):
        return self.norm(x * self.scale)


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_compile_fullgraph(last):
    """One graph for every batch and size, equal to eager; public apex's test: no graph break, one graph."""
    from torch._dynamo.testing import CompileCounterWithBackend

    module = Scaled()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for batch, size in ((2, 6), (3, 9), (5, 7)):
        x = torch.randn(batch, 8, size, size + 1, dtype=F32, device="cpu")
        x = channels_last(x) if last else x
        found, expected = compiled(x), module(x)
        assert found.stride() == expected.stride()
        ours, eager = (
            torch.autograd.grad(y.square().sum(), list(module.parameters())) for y in (found, expected)
        )
        for a, b in zip(ours, eager, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        counts.append(counter.frame_count)
    # dynamic=True compiles a module twice at once if it holds a float, torch's own too: eps turns out to be constant.
    assert counts[0] <= 2 and counts == counts[:1] * 3


def test_export():
    block, x = Block(), torch.randn(2, 3, 6, 6, dtype=F32, device="cpu")
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(block, (x,), dynamic_shapes=({0: batch},))
    x = torch.randn(5, 3, 6, 6, dtype=F32, device="cpu")
    torch.testing.assert_close(program.module()(x), block(x))


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_autocast(dtype):
    """The output has the input's dtype, as public apex's: half after a convolution, float32 after a sum of float32."""
    block = Block()
    with torch.autocast("cpu", dtype):
        y = block(torch.randn(2, 3, 6, 6, dtype=F32, device="cpu"))
        assert y.dtype == dtype
        assert block.norm(torch.randn(2, 8, 3, 3, dtype=F32, device="cpu")).dtype == F32
    y.float().sum().backward()
    assert block.norm.weight.grad.dtype == F32 and block.conv.weight.grad.isfinite().all()


def test_meta_tensors():
    x = channels_last(torch.empty(2, 8, 3, 3, dtype=BF16, device="meta"))
    y, mean, rstd = torch.ops.apex.group_norm_forward(x, 4)
    assert y.stride() == x.stride() and y.dtype == BF16 and mean.shape == rstd.shape == (2, 4)
    assert mean.dtype == F32


@pytest.mark.gpu
def test_cuda_graph():
    """Captured and replayed: one launch and two, forward and backward."""
    for shape in ((2, 320, 16, 16), (2, 320, 64, 64)):
        x, w, b = make(shape, F16, "cuda")
        expected = torch.autograd.grad(run(x, 32, w, b, True).float().square().sum(), (x, w, b))
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.autograd.grad(run(x, 32, w, b, True).float().square().sum(), (x, w, b))
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = torch.autograd.grad(run(x, 32, w, b, True).float().square().sum(), (x, w, b))
        for _ in range(3):
            graph.replay()
        for a, e in zip(found, expected, strict=True):
            assert torch.equal(a, e)
