"""The op against float64 on everything that can serve it, and how it behaves in torch."""

from __future__ import annotations

import subprocess
import sys
import warnings

import lists
import pytest
import softmaxes
import torch
from lists import BF16, F16, F32, F64
from loader.described import ROOT
from softmaxes import check, forward, random, random_mask
from torch.library import opcheck

from apex._loader import bindings
from apex.reference import scaled_masked_softmax as references

bindings.load()
# No batch; no keys; one; odd; some lanes; a warp; odd strips; a warp of eight vectors a thread, and odd; a block; the
# largest block; longer than registers.
SHAPES = [
    (0, 2, 3, 8),
    (2, 1, 3, 0),
    (3, 3, 1, 1),
    (2, 3, 5, 7),
    (1, 3, 3, 24),
    (1, 1, 7, 33),
    (1, 3, 2, 256),
    (2, 2, 37, 131),
    (1, 1, 3, 1000),
    (1, 1, 3, 1091),
    (1, 1, 2, 1088),
    (1, 1, 2, 2048),
    (1, 1, 1, 2049),
    (1, 1, 2, 4096),
    (1, 1, 2, 16400),
    (1, 1, 2, 16385),
]


@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_values(variant, dtype, causal, masked):
    """Report: lengths such as 1088 or 16385 aborted; a fully masked row averaged everything."""
    for shape in SHAPES:
        mask = random_mask((shape[0], 1, *shape[2:]), variant.device) if masked and all(shape) else None
        y, dx = check(random(shape, dtype, variant.device), mask, causal=causal)
        if mask is not None:
            assert y[0, :, 0].eq(0).all() and dx[0, :, 0].eq(0).all()
    if variant.simt:
        assert variant.kernels.total() > 0


def test_causal_squares(variant):
    """Rows of every length; and fewer keys than queries, whose first rows keep nothing."""
    for dtype, shape in ((BF16, (2, 1, 70, 70)), (F32, (1, 3, 37, 37)), (F16, (5, 64, 64)), (F16, (9, 5))):
        y, _ = check(random(shape, dtype, variant.device), causal=True)
        assert y[..., softmaxes.upper(y).to(y.device)].eq(0).all()
    assert y[:4].eq(0).all() and y[4:].sum(-1).gt(0.99).all()


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_fully_masked_rows(variant, dtype):
    """Report, as given: row 2 of (1, 1, 4, 32) masked, and lengths 33 and 4096."""
    for keys in (32, 33, 4096):
        x = random((1, 1, 4, keys), dtype, variant.device)
        mask = torch.zeros(1, 1, 4, keys, dtype=torch.bool, device=variant.device)
        mask[:, :, 2] = True
        y, dx = check(x, mask, scale=1.0)
        assert y[:, :, 2].eq(0).all() and dx[:, :, 2].eq(0).all() and y.isfinite().all()
        torch.testing.assert_close(
            y[:, :, [0, 1, 3]].float(), torch.softmax(x[:, :, [0, 1, 3]].float(), -1), rtol=1e-2, atol=1e-5
        )


def test_masks(variant):
    """bool and uint8; every way to broadcast; views; bytes other than 1; more dimensions than four."""
    device = variant.device
    x = random((2, 3, 4, 40), BF16, device)
    for shape in ((2, 1, 4, 40), (1, 1, 4, 40), (2, 3, 4, 40), (2, 1, 1, 40), (40,), (4, 1), (1, 3, 1, 40)):
        mask = random_mask(shape, device)
        y, _ = check(x, mask)
        assert torch.equal(y, forward(x, mask.to(torch.uint8) * 7))
    check(x, random_mask((2, 1, 40, 4), device).transpose(2, 3))
    check(x, random_mask((2, 1, 4, 81), device)[..., 1::2])
    check(x, lists.misaligned([random_mask((2, 1, 4, 40), device)])[0])
    check(random((2, 2, 3, 4, 24), F32, device), random_mask((2, 1, 1, 4, 24), device))
    check(random((24,), F32, device), random_mask((24,), device).logical_not_())
    check(random((4, 24), F32, device), random_mask((4, 24), device), causal=True)


def test_layouts(variant):
    """Transposed and sliced input, expanded gradients, views that begin between two vectors."""
    device = variant.device
    check(random((40, 3), BF16, device).t())
    check(random((4, 3, 64), F32, device)[::2, :, ::2], causal=True)
    for dtype in (F32, F16, BF16):
        check(lists.misaligned([random((3, 64), dtype, device)])[0])
        check(lists.misaligned([random((3, 1, 3, 35), dtype, device)])[0], random_mask((3, 35), device))
    x = random((3, 40), F32, device).requires_grad_()
    y = forward(x)
    narrow = random((3, 1), F32, device)
    (wanted,) = torch.autograd.grad(y, x, narrow.expand(3, 40).contiguous(), retain_graph=True)
    assert torch.equal(torch.autograd.grad(y, x, narrow.expand(3, 40), retain_graph=True)[0], wanted)
    misaligned = lists.misaligned([random((3, 40), F32, device, seed=3)])[0]
    softmaxes.near_gradient(torch.autograd.grad(y, x, misaligned)[0], y, misaligned)


def test_scales(variant):
    """Any float: negative, 0 and large."""
    for dtype in (F32, BF16, F64):
        x = random((3, 40), dtype, variant.device)
        for scale in (1.0, -2.5, 0.0, 1e-3, 100.0):
            check(x, scale=scale)
            check(x, random_mask((3, 40), variant.device), scale=scale, causal=True)


def test_extreme_values(variant):
    """inf and nan do in their row what they do in torch.softmax, and nothing in another; finfo.min is a number."""
    device = variant.device
    low = torch.finfo(F32).min
    for keys in (40, 35):
        x = random((7, keys), F32, device)
        x[0] = -torch.inf
        x[1, 3], x[2, 4], x[3, 5] = torch.inf, torch.nan, -torch.inf
        x[4] = low
        x[5, ::2] = low
        x[6] += 1e4  # keeps its digits
        y = forward(x, None, 1.0)
        torch.testing.assert_close(y, torch.softmax(x, -1), rtol=1e-5, atol=1e-7, equal_nan=True)
        nothing = torch.zeros(7, keys, dtype=torch.bool, device=device)
        torch.testing.assert_close(forward(x, nothing, 1.0), y, rtol=1e-6, atol=1e-7, equal_nan=True)
    mask = torch.zeros(7, keys, dtype=torch.bool, device=device)
    mask[1, 3] = mask[2, 4] = mask[0, 1:] = True
    y = forward(x, mask, 1.0)  # what is masked is not looked at
    assert y[1:3].isfinite().all() and y[0].isnan().all()
    y = forward(torch.full((4, 4), torch.nan, dtype=F32, device=device), None, 1.0, True)
    assert (
        torch.equal(y.isnan(), softmaxes.upper(y).logical_not().to(device))
        and y.triu(1).nan_to_num().eq(0).all()
    )


def test_rows_sum_to_one(variant):
    """Report: where a wave has other lanes than was assumed, half of a row was left out of its sum."""
    for keys in (1000, 2048, 8192):
        y = forward(random((1, 2, keys), F32, variant.device), None, 1.0)
        torch.testing.assert_close(
            y.double().sum(-1), torch.ones(1, 2, dtype=F64, device=y.device), rtol=1e-5, atol=0
        )


def test_same_bits(variant):
    x, mask = random((5, 1000), BF16, variant.device), random_mask((5, 1000), variant.device)
    lists.assert_same_bits(check(x, mask), check(x, mask))


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_no_less_accurate_than_torch(variant, dtype):
    """Largest and root mean square error against float64, forward and backward, beside torch's own op."""
    x = random((256, 1000), dtype, variant.device, scale=2.0).requires_grad_()
    dy = random((256, 1000), dtype, variant.device, seed=3)
    wide = x.detach().cpu().double().requires_grad_()
    expected = torch.softmax(wide, -1)
    (wanted,) = torch.autograd.grad(expected, wide, dy.cpu().double())

    def errors(y):
        (dx,) = torch.autograd.grad(y, x, dy)
        both = ((y.detach().cpu().double() - expected).abs(), (dx.cpu().double() - wanted).abs())
        return [(e.max().item(), e.square().mean().sqrt().item()) for e in both]

    for ours, theirs in zip(errors(forward(x, None, 1.0)), errors(torch.softmax(x, -1)), strict=True):
        assert ours[0] <= 1.5 * theirs[0] and ours[1] <= 1.1 * theirs[1], (ours, theirs)


# ---- in torch, by whatever serves the op here ------------------------------------------------------------------


def test_small_shares_on_the_cpu():
    """Relative errors, which a row's other elements cannot hide: exponentials of -80 to 0, rows with every rest."""
    for keys in (*range(2, 70), 2047, 2081, 4099):
        row = torch.linspace(-80, 0, keys, dtype=F64, device="cpu")
        rows = torch.stack((row, row.flip(0))).float().view(1, 1, 2, keys)
        found, exact = forward(rows, None, 1.0, False).double(), rows.double().softmax(-1)
        assert ((found - exact) / exact).abs().max() < 3e-7, keys
        for dtype in (F16, BF16):
            short = rows.to(dtype)
            exact = short.double().softmax(-1)
            error = (forward(short, None, 1.0, False).double() - exact).abs().max()
            assert error <= (short.softmax(-1).double() - exact).abs().max() + 1e-7, (keys, dtype)


def test_opcheck():
    op = torch.ops.apex
    x, mask = random((2, 3, 4, 9), F32, "cpu"), random_mask((2, 1, 4, 9), "cpu")
    for arguments in ((x,), (x, mask, 0.5), (x, None, 0.5, True), (x.bfloat16(), mask, 2.0, True)):
        opcheck(op.scaled_masked_softmax_forward, (arguments[0].clone().requires_grad_(), *arguments[1:]))
    y = forward(x, mask)
    for leaves in ((y, x), (y.clone().requires_grad_(), x.clone().requires_grad_())):
        opcheck(op.scaled_masked_softmax_backward, (*leaves, 0.5))
        opcheck(op.scaled_masked_softmax_backward, (*leaves, 0.5, True))


def test_derivatives():
    """First and second, as torch's own op has."""
    x = random((1, 2, 3, 4), F64, "cpu").requires_grad_()
    mask = random_mask((1, 1, 3, 4), "cpu")
    for arguments in ((None, 0.5), (mask, 0.5), (None, -0.5, True), (mask, 1.5, True)):
        assert torch.autograd.gradcheck(lambda x, a=arguments: forward(x, *a), x)
        assert torch.autograd.gradgradcheck(lambda x, a=arguments: forward(x, *a), x)
    half = x.detach().half().requires_grad_()
    (first,) = torch.autograd.grad(forward(half).square().sum(), half, create_graph=True)
    first.sum().backward()
    assert half.grad.dtype == F16


def test_transforms():
    """torch.func.grad works; forward mode is refused, not silently zero."""
    x = random((3, 8), F32, "cpu")
    found = torch.func.grad(lambda x: forward(x).square().sum())(x)
    wide = x.double().requires_grad_()
    (wanted,) = torch.autograd.grad(softmaxes.exact(wide).square().sum(), wide)
    torch.testing.assert_close(found, wanted.float())
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(forward, (x,), (x,))


def test_vmap():
    """Also of the gradient; torch runs it batch by batch, and warns that it does."""
    if not bindings.load().native:
        pytest.skip("ops that are defined from Python refuse it, in torch's words")
    x, mask = random((3, 2, 4, 8), F32, "cpu"), random_mask((2, 4, 8), "cpu")

    def loss(x):
        return forward(x, mask).square().sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(torch.func.vmap(lambda x: forward(x, mask))(x), forward(x, mask))
        found = torch.func.vmap(torch.func.grad(loss))(x)
    assert torch.equal(found, torch.func.grad(loss)(x))


def test_usual_errors_of_autograd():
    x = random((3, 8), F32, "cpu").requires_grad_()
    y = forward(x)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
    y = forward(x)
    y.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        y.sum().backward()


def test_checkpoint_and_saved_tensor_hooks():
    from torch.utils.checkpoint import checkpoint

    x = random((3, 8), F32, "cpu").requires_grad_()
    (plain,) = torch.autograd.grad(forward(x).square().sum(), x)
    y = checkpoint(forward, x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], plain)
    with torch.autograd.graph.save_on_cpu():
        y = forward(x)
    assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], plain)


def test_autocast():
    """Scores are cast to autocast's dtype, as in public apex, and gradients come back in their own."""
    x = random((3, 16), F32, "cpu").requires_grad_()
    for dtype in (BF16, F16):
        with torch.autocast("cpu", dtype):
            y = forward(x)
            assert forward(x.detach().double()).dtype == F64
        assert torch.equal(y, forward(x.to(dtype)))
        assert torch.autograd.grad(y.float().square().sum(), x)[0].dtype == F32


def test_compile_with_any_batch():
    """One graph for several batch sizes, equal to eager."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")

    def function(x, mask):
        return forward(forward(x * 2.0, mask, 0.5), None, 1.5, True)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for batch in (4, 9, 5):
        x = random((batch, 2, 6, 6), BF16, "cpu").requires_grad_()
        mask = random_mask((batch, 1, 6, 6), "cpu")
        ours, eager = compiled(x, mask), function(x, mask)
        assert torch.equal(ours, eager)
        for a, b in zip(*(torch.autograd.grad(y.sum(), x) for y in (ours, eager)), strict=True):
            assert torch.equal(a, b)
    assert counter.frame_count == 1


def test_meta_and_export():
    y = forward(torch.empty(3, 5, 16, dtype=F16, device="meta").transpose(0, 1))
    assert y.device.type == "meta" and y.dtype == F16 and y.shape == (5, 3, 16) and y.is_contiguous()

    class Module(torch.nn.Module):
        def forward(self, x):
            return forward(x, None, 0.5, True)

    x = random((4, 6, 6), F32, "cpu")
    exported = torch.export.export(Module(), (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    assert "scaled_masked_softmax_forward" in exported.graph_module.code
    other = random((7, 6, 6), F32, "cpu", seed=9)
    assert torch.equal(exported.module()(other), Module()(other))


@pytest.mark.parametrize("reference", [False, True], ids=["op", "reference"])
@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda f, x: f(x.int()), TypeError, "float32, float16, bfloat16"),
        (lambda f, x: f(x, x), TypeError, "bool or uint8.*added"),
        (lambda f, x: f(x, x[..., :3].bool()), ValueError, r"shape \[2, 3, 3\] does not broadcast"),
        (lambda f, x: f(x, x.bool()[None]), ValueError, "does not broadcast"),
        (lambda f, x: f(x[0, 0], None, 1.0, True), ValueError, "one of queries"),
        (lambda f, x: f(x.sum()), ValueError, "dimension of keys"),
    ],
)
def test_errors(reference, call, error, text):
    function = references.scaled_masked_softmax_forward if reference else forward
    with pytest.raises(error, match=text):
        call(function, random((2, 3, 8), F32, "cpu"))


def test_backward_errors():
    y = forward(random((2, 8), F32, "cpu"))
    backward = torch.ops.apex.scaled_masked_softmax_backward
    with pytest.raises(ValueError, match="has shape .* not the output's"):
        backward(y[:1], y)
    with pytest.raises(TypeError, match="has dtype .* not the output's"):
        backward(y.half(), y)


def test_without_bindings(tmp_path):
    """Where no binding fits this torch, the same op is differentiable from Python."""
    code = """
import torch
from apex.transformer.functional.fused_softmax import ScaledUpperTriangMaskedSoftmax, scaled_masked_softmax
from apex._loader import bindings
from apex.reference import scaled_masked_softmax as references
assert not bindings.load().native
torch.manual_seed(0)
x = torch.randn(2, 2, 3, 4, dtype=torch.float64, requires_grad=True)
mask = torch.rand(2, 1, 3, 4) < 0.4
for function in (
    lambda x: scaled_masked_softmax(x, mask, 0.5), lambda x: ScaledUpperTriangMaskedSoftmax.apply(x, 0.5)
):
    assert function(x).shape == x.shape
    assert torch.autograd.gradcheck(function, x) and torch.autograd.gradgradcheck(function, x)
with torch.autocast("cpu", torch.bfloat16):
    assert scaled_masked_softmax(x.float(), mask, 0.5).dtype == torch.bfloat16
compiled = torch.compile(lambda x: scaled_masked_softmax(x, mask, 0.5), fullgraph=True, backend="aot_eager")
torch.testing.assert_close(compiled(x), scaled_masked_softmax(x, mask, 0.5))
print("done")
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "APEX_TREE": str(tmp_path), "PATH": "/usr/bin"},
    )
    assert done.stdout.strip().endswith("done"), done.stderr


@pytest.mark.gpu
def test_in_a_cuda_graph():
    """Forward and backward, captured and replayed on other values."""
    x, g = (random((2, 3, 100, 128), BF16, "cuda", seed=s) for s in (1, 3))
    x.requires_grad_()

    def step():
        y = forward(x, None, 0.5, True)
        return y, torch.autograd.grad(y, x, g)[0]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.copy_(random((2, 3, 100, 128), BF16, "cuda", seed=9))
    graph.replay()
    lists.assert_same_bits(captured, step())


@pytest.mark.gpu
def test_more_than_2_31_elements():
    """Both ends of 2^32 elements, causal; and one row after another of 2^31 + some."""
    free = torch.cuda.mem_get_info()[0] >> 30
    if free < 40:
        pytest.skip(f"needs 40 GiB of GPU memory, {free} are free")
    x = torch.zeros(16, 16, 4096, 4096, dtype=BF16, device="cuda").requires_grad_()
    y = forward(x, None, 1.0, True)
    (dx,) = torch.autograd.grad(y, x, torch.ones((), dtype=BF16, device="cuda").expand_as(y))
    for part in (y[0, 0], y[15, 15]):
        assert torch.equal(
            part[0],
            torch.nn.functional.one_hot(torch.tensor(0, device="cuda", dtype=torch.int64), 4096).to(BF16),
        )
        assert part[4095].eq(2.0**-12).all()
    assert dx[15, 15].abs().max() < 1e-3


def test_exponentials_near_the_smallest_normal_number(variant):
    """Down to 2^-126 they are what they are."""
    x = torch.zeros(1, 1, 40, 33, dtype=F32, device=variant.device)
    x[..., 1] = -86.9 - 0.01 * torch.arange(40, dtype=F32, device=variant.device)
    x[..., 2:] = -200
    check(x, scale=1.0)
    y = forward(x, scale=1.0)[..., 1].double().cpu()
    torch.testing.assert_close(y, x[..., 1].double().cpu().exp(), rtol=1e-5, atol=0)
