"""apex.transformer.functional.FusedScaleMaskSoftmax and the legacy modules, as users call them."""

from __future__ import annotations

import pytest
import softmaxes
import torch
from lists import BF16, F16, F32, F64, ROUNDING
from softmaxes import random, random_mask

from apex._legacy import (
    generic_scaled_masked_softmax_cuda,
    scaled_masked_softmax_cuda,
    scaled_softmax_cuda,
    scaled_upper_triang_masked_softmax_cuda,
)
from apex.transformer import AttnMaskType, functional
from apex.transformer.functional import fused_softmax as functions
from apex.transformer.functional.fused_softmax import FusedScaleMaskSoftmax, GenericFusedScaleMaskSoftmax
from tests.L0.signatures import signature

PADDING, CAUSAL = AttnMaskType.padding, AttnMaskType.causal


def mask_func(scores, mask):
    return scores.masked_fill(mask, -10000.0)


def make(dtype, kind=PADDING, fusion=True, fp32=True, scale=None):
    return FusedScaleMaskSoftmax(dtype == F16, dtype == BF16, kind, fusion, mask_func, fp32, scale)


@pytest.fixture
def launches(monkeypatch):
    """Counts calls of the op by the module."""
    seen = []
    softmax = functions._softmax

    def counted(*arguments):
        seen.append(arguments)
        return softmax(*arguments)

    monkeypatch.setattr(functions, "_softmax", counted)
    return seen


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("kind", [PADDING, CAUSAL], ids=str)
@pytest.mark.parametrize("scale", [None, 2.0], ids=str)
def test_fused_matches_torch(variant, dtype, kind, scale):
    """The shapes of public apex's tests, and one that its kernel refuses."""
    for shape in ((4, 12, 24, 24), (8, 3, 4, 214), (1, 3, 1, 33)):
        if kind is CAUSAL:
            mask = (
                softmaxes.upper(torch.empty(shape, dtype=F32, device="cpu"))
                .expand(shape[0], 1, *shape[2:])
                .to(variant.device)
            )
        else:
            mask = random_mask((shape[0], 1, *shape[2:]), variant.device)
            mask[..., 0] = False  # torch's way averages what is masked in whole
        x = random(shape, dtype, variant.device).requires_grad_()
        g = random(shape, dtype, variant.device, seed=3)
        fused, plain = (make(dtype, kind, fusion, scale=scale)(x, mask) for fusion in (True, False))
        torch.testing.assert_close(fused, plain)
        ours, theirs = (torch.autograd.grad(y, x, g)[0] for y in (fused, plain))
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=16 * ROUNDING[dtype])


def test_the_flag_decides(launches):
    """Report: the generic fused softmax was never really called; the flag was ignored."""
    x, mask = random((2, 3, 4, 33), BF16, "cpu").requires_grad_(), random_mask((2, 1, 4, 33), "cpu")
    for fusion in (True, False):
        for module in (
            GenericFusedScaleMaskSoftmax(False, True, fusion, mask_func, True, None),
            make(BF16, fusion=fusion),
            make(BF16, CAUSAL, fusion),
        ):
            launches.clear()
            assert module.is_kernel_available(mask, 2, 3, 4, 33) is fusion
            module(x, mask).float().sum().backward()
            assert len(launches) == fusion
    assert not make(F32).is_kernel_available(mask, 2, 3, 4, 33)  # neither dtype was promised: torch's way
    make(F32)(x.float(), mask)
    assert len(launches) == 0


@pytest.mark.parametrize("keys", [1, 33, 1024, 1088, 2049, 4096, 16384, 16385])
def test_every_length_is_available(launches, keys):
    """Report: lengths aborted the process or dropped silently to slow code. Odd batches times heads, one query."""
    for kind in (PADDING, CAUSAL):
        module, mask = (
            make(BF16, kind),
            random_mask((1, 1, 1, keys), "cpu") & (torch.arange(keys, dtype=torch.int64, device="cpu") > 0),
        )
        assert module.is_kernel_available(mask, 1, 3, 1, keys)
        x = random((1, 3, 1, keys), BF16, "cpu")
        y = module(x, mask)
        softmaxes.near(y, softmaxes.exact(x, mask if kind is PADDING else None, 1.0))
    assert len(launches) == 2
    assert FusedScaleMaskSoftmax.get_batch_per_block(1, keys, 1, 3) == 1


def test_no_mask():
    """Causal without a mask is causal either way; padding without one is plain softmax."""
    x = random((2, 1, 5, 7), BF16, "cpu")
    for kind in (PADDING, CAUSAL):
        fused, plain = (make(BF16, kind, fusion)(x, None) for fusion in (True, False))
        torch.testing.assert_close(fused, plain)
        assert (fused[..., 0, -1] == 0).all() == (kind is CAUSAL)


def test_gradients_are_left_alone():
    """Public apex's kernels wrote theirs over the one that came in, which a second consumer then read."""
    x = random((1, 2, 4, 16), BF16, "cpu").requires_grad_()
    y = make(BF16, CAUSAL)(x, None)
    g = random((1, 2, 4, 16), BF16, "cpu", seed=3)
    kept = g.clone()
    first, again = (torch.autograd.grad(y, x, g, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(g, kept) and torch.equal(first, again)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_autocast(dtype):
    """Scores in float32 come out in autocast's dtype."""
    x = random((2, 3, 8, 8), F32, "cpu").requires_grad_()
    mask = random_mask((2, 1, 8, 8), "cpu")
    for kind in (PADDING, CAUSAL):
        with torch.autocast("cpu", dtype):
            y = make(dtype, kind)(x, mask)
        assert y.dtype == dtype
        assert torch.equal(y, make(dtype, kind)(x.to(dtype), mask))
        assert torch.autograd.grad(y.float().sum(), x)[0].dtype == F32


def test_compile_fullgraph():
    """One graph for any batch, equal to eager, backward included."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    module = make(BF16, scale=0.5)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
    compiled(random((4, 2, 6, 6), BF16, "cpu"), random_mask((4, 1, 6, 6), "cpu"))
    once = counter.frame_count
    compiled(random((5, 2, 6, 6), BF16, "cpu"), random_mask((5, 1, 6, 6), "cpu"))
    assert counter.frame_count == once
    for batch in (4, 7, 9):
        x, mask = random((batch, 2, 6, 6), BF16, "cpu").requires_grad_(), random_mask((batch, 1, 6, 6), "cpu")
        ours, eager = compiled(x, mask), module(x, mask)
        assert torch.equal(ours, eager)
        assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (ours, eager)))
    assert counter.frame_count == once + 1  # with gradients


def test_constructor_refuses():
    with pytest.raises(RuntimeError, match="both fp16 and bf16"):
        FusedScaleMaskSoftmax(True, True, PADDING, True, mask_func, True, None)
    with pytest.raises(RuntimeError, match="fp32 when scaled"):
        make(BF16, fp32=False, scale=2.0)
    with pytest.raises(ValueError, match="attn_mask_type"):
        make(BF16, kind=None)
    make(BF16, kind=None, fusion=False)
    with pytest.raises(ValueError, match="batch, heads, queries, keys"):
        make(BF16)(torch.ones(2, 3, 4, dtype=F32, device="cpu"), None)


SIGNATURES = {
    "ScaledUpperTriangMaskedSoftmax": "(ctx, inputs, scale)",
    "scaled_upper_triang_masked_softmax": "(inputs, _, scale)",
    "ScaledMaskedSoftmax": "(ctx, inputs, mask, scale)",
    "scaled_masked_softmax": "(inputs, mask, scale)",
    "GenericScaledMaskedSoftmax": "(ctx, inputs, mask, scale)",
    "generic_scaled_masked_softmax": "(inputs, mask, scale)",
    "ScaledSoftmax": "(ctx, inputs, scale)",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_public_signatures(name):
    found = getattr(functions, name)
    assert signature(getattr(found, "forward", found)) == SIGNATURES[name]


def test_functions():
    x, mask = random((2, 3, 5, 5), F32, "cpu"), random_mask((2, 1, 5, 5), "cpu")
    masked = softmaxes.exact(x, mask)
    for found in (
        functions.ScaledMaskedSoftmax.apply(x, mask, softmaxes.SCALE),
        functions.scaled_masked_softmax(x, mask, softmaxes.SCALE),
        functions.GenericScaledMaskedSoftmax.apply(x, mask, softmaxes.SCALE),
        functions.generic_scaled_masked_softmax(x, mask, softmaxes.SCALE),
    ):
        softmaxes.near(found, masked)
    causal = softmaxes.exact(x, causal=True)
    softmaxes.near(functions.ScaledUpperTriangMaskedSoftmax.apply(x[0], softmaxes.SCALE), causal[0])
    softmaxes.near(functions.scaled_upper_triang_masked_softmax(x, mask, softmaxes.SCALE), causal)
    softmaxes.near(functions.ScaledSoftmax.apply(x, softmaxes.SCALE), softmaxes.exact(x))
    softmaxes.near(functions.scaled_masked_softmax(x, None, softmaxes.SCALE), softmaxes.exact(x))
    assert functional.FusedScaleMaskSoftmax is FusedScaleMaskSoftmax


@pytest.mark.parametrize("dtype", [F16, BF16, F64], ids=str)
def test_legacy_modules(dtype):
    """Every function; the scale as a tensor of one, as Megatron-LM passes it."""
    scale = torch.tensor([0.5], dtype=F32, device="cpu")[0]
    x, mask = random((2, 3, 4, 6), dtype, "cpu").requires_grad_(), random_mask((2, 1, 4, 6), "cpu").byte()
    g = random((2, 3, 4, 6), dtype, "cpu", seed=3)
    for module, more, causal in (
        (scaled_masked_softmax_cuda, (mask,), False),
        (generic_scaled_masked_softmax_cuda, (mask,), False),
        (scaled_softmax_cuda, (), False),
        (scaled_upper_triang_masked_softmax_cuda, (), True),
    ):
        given, grad = (x, g) if not causal else (x[0], g[0])
        y = module.forward(given, *more, scale)
        assert not y.requires_grad
        softmaxes.near(y, softmaxes.exact(given, *(more or (None,)), 0.5, causal))
        kept = grad.clone()
        softmaxes.near_gradient(module.backward(grad, y, scale), y, grad, 0.5)
        assert torch.equal(grad, kept)
        with pytest.raises(ValueError, match="dimensions"):
            module.forward(x[0, 0], *more, scale)
        with pytest.raises(ValueError, match="softmax_results"):
            module.backward(grad, y[0], scale)
    assert scaled_masked_softmax_cuda.get_batch_per_block(1023, 17, 3, 5) == 1
    with torch.autocast("cpu", F16 if dtype == BF16 else BF16):
        assert scaled_softmax_cuda.forward(x, scale).dtype == dtype


def test_a_mask_without_what_applies_it_is_refused():
    module = FusedScaleMaskSoftmax(False, False, PADDING, False, None, True, None)
    scores = torch.zeros(1, 1, 2, 2, dtype=torch.float32, device="cpu")
    assert torch.equal(module(scores, None), torch.full_like(scores, 0.5))
    with pytest.raises(ValueError, match="a mask was given, and no mask_func"):
        module(scores, torch.zeros(1, 1, 2, 2, dtype=torch.bool, device="cpu"))
