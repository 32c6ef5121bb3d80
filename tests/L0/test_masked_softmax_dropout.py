"""The op against float64 on everything that can serve it, what its dropout keeps, and how it behaves in torch."""

from __future__ import annotations

import lists
import pytest
import softmaxes
import torch
from lists import BF16, F16, F32, F64
from softmaxes import near, near_gradient, random, random_mask
from torch.library import opcheck

from apex._loader import bindings
from apex.reference import masked_softmax_dropout as references

bindings.load()
DTYPES = [F32, F16, BF16, F64]
# No batch; no keys; one; odd; some lanes of a warp; a warp of 1, 2 and 4 vectors a thread; a block; odd; longer than
# registers.
SHAPES = [
    (0, 2, 3, 8),
    (2, 1, 3, 0),
    (3, 3, 1, 1),
    (2, 3, 5, 7),
    (1, 3, 3, 24),
    (2, 2, 3, 128),
    (1, 3, 2, 256),
    (1, 2, 3, 512),
    (1, 2, 3, 1024),
    (1, 1, 3, 1091),
    (1, 1, 2, 2056),
    (1, 1, 2, 16392),
    (1, 1, 2, 16385),
]


def seed_of(value, device):
    return torch.tensor([value], dtype=torch.int64, device=device)


def forward(x, mask=None, dropout=0.0, seed=None, keep_mask=False):
    return torch.ops.apex.masked_softmax_dropout_forward(x, mask, dropout, seed, keep_mask)


def exact(x, mask):
    """The softmax in float64; the mask's numbers are as the input's dtype has them."""
    if mask is None or not mask.is_floating_point():
        return softmaxes.exact(x, mask, 1.0)
    added = mask.detach().cpu().to(x.dtype).to(F64)
    left_out = (added == -torch.inf).expand(x.shape)
    return softmaxes.exact(x.detach().cpu().to(F64) + added, left_out, 1.0)


def largest(x, mask):
    """Of what exponentials are made of: its rounding shows relatively."""
    found = x.detach().abs().max() if x.numel() else x.new_zeros(())
    if mask is not None and mask.is_floating_point() and mask.numel():
        found = found.cpu() + mask.abs().cpu().masked_fill(mask.cpu().isinf(), 0).max()
    return float(found)


def check(x, mask=None, dropout=0.0, value=99):
    """Forward and backward, with and without the stored mask, against float64: (output, softmax, kept, gradient)."""
    x = x.detach().requires_grad_()
    seed = seed_of(value, x.device) if dropout else None
    output, softmax, kept = forward(x, mask, dropout, seed, True)
    assert output.dtype == x.dtype and output.shape == x.shape and kept.dtype == torch.uint8
    assert kept.shape == x.shape and not kept.requires_grad
    before, scale = (softmax, 1 / (1 - dropout) if dropout < 1 else 0.0) if dropout else (output, 1.0)
    near(before, exact(x, mask), largest(x, mask))
    near(output, exact(x, mask) * kept.cpu() * scale, largest(x, mask) + 1)
    dy = random(x.shape, x.dtype, x.device, seed=3, scale=1.0)
    given = dy.clone()
    (dx,) = torch.autograd.grad(output, x, dy)
    near_gradient(dx, before, torch.where(kept.bool(), dy, 0), scale)
    by_mask = torch.ops.apex.masked_softmax_dropout_backward(dy, before.detach(), kept, dropout)
    lists.assert_same_bits([by_mask], [dx])
    assert torch.equal(dy, given), "the caller's gradient was written"
    plain, _, none = forward(x, mask, dropout, seed)
    lists.assert_same_bits([plain], [output])
    assert none.numel() == 0
    return output.detach(), before.detach(), kept, dx


def masks(shape, dtype, device):
    """None, padding, time, and numbers: of each key and of each score, -inf among them."""
    batch, heads, queries, keys = shape
    padding = random_mask((batch, 1, 1, keys), device)
    added = random((batch, 1, 1, keys), dtype, device, seed=8)
    every = random((batch, heads, queries, keys), dtype, device, seed=9).masked_fill(padding, -torch.inf)
    return None, padding, random_mask((queries, keys), device).to(torch.uint8) * 7, added, every


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.9])
def test_values(variant, dtype, dropout):
    for shape in SHAPES:
        for mask in masks(shape, dtype, variant.device) if all(shape) else (None,):
            check(random(shape, dtype, variant.device), mask, dropout)
    if variant.simt:
        assert variant.kernels.total() > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_keep_nothing(variant, dtype):
    """Masked by bytes or by -inf: zeros, and a gradient of zeros, where a softmax of -inf alone is nan."""
    for keys in (8, 33, 512, 4096):
        x = random((2, 1, 3, keys), dtype, variant.device)
        mask = torch.zeros(2, 1, 1, keys, dtype=torch.bool, device=variant.device)
        mask[1] = True
        for given in (
            mask,
            torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf),
        ):
            output, softmax, _, dx = check(x, given, 0.25)
            assert all(t[1].eq(0).all() and t[0].isfinite().all() for t in (output, softmax, dx))
    x = torch.full((1, 1, 2, 8), -torch.inf, dtype=dtype, device=variant.device)
    assert forward(x)[0].isnan().all(), "as torch.softmax: nothing was masked"


def test_masks_of_numbers(variant):
    """Any floating dtype, rounded to the input's: what is too small for it leaves a key out. They take no gradient."""
    x = random((2, 2, 3, 40), F16, variant.device)
    for dtype in (F32, F16, BF16, F64):
        added = random((3, 40), dtype, variant.device, seed=8)
        check(x, added, 0.5)
        added[:, 3] = -1e9 if dtype != F16 else -torch.inf
        assert check(x, added, 0.5)[1][..., 3].eq(0).all()
    added = random((40,), F16, variant.device).requires_grad_()
    output = forward(x.requires_grad_(), added)[0]
    assert torch.autograd.grad(output.sum(), (x, added), allow_unused=True)[1] is None


def test_layouts(variant):
    """Transposed, sliced, misaligned and expanded inputs, masks and gradients."""
    device = variant.device
    wanted = check(random((3, 40), F16, device), None, 0.5)
    for change in (
        lambda t: t.t().contiguous().t(),
        lambda t: t.repeat_interleave(2, -1)[..., ::2],
        lambda t: lists.misaligned([t])[0],
    ):
        lists.assert_same_bits(check(change(random((3, 40), F16, device)), None, 0.5)[2:3], wanted[2:3])
    for dtype in (F16, F32):
        x = random((2, 3, 4, 40), dtype, device)
        check(x, random_mask((2, 1, 40, 4), device).transpose(2, 3), 0.5)
        check(x, random_mask((2, 1, 4, 81), device)[..., 1::2], 0.5)
        check(x, lists.misaligned([random((2, 1, 1, 40), dtype, device)])[0], 0.5)
        check(x, random((2, 3, 4, 1), dtype, device), 0.5)
        check(random((2, 2, 3, 4, 24), dtype, device), random((2, 1, 1, 4, 24), dtype, device, seed=4), 0.5)
        check(random((24,), dtype, device), None, 0.5)
    x = random((3, 40), F32, device).requires_grad_()
    output = forward(x, None, 0.5, seed_of(1, device))[0]
    by_sum = torch.autograd.grad(output.sum(), x, retain_graph=True)
    lists.assert_same_bits(by_sum, torch.autograd.grad(output, x, torch.ones_like(output)))


def test_kept_is_the_same_everywhere(variant):
    """Whatever serves the op, and whatever the row's length and dtype, element e has bit e % 8 of counter e // 8."""
    for shape in ((2, 3, 128), (5, 7), (3, 33), (1, 3, 1091), (2, 4096), (1, 16392)):
        for dtype in DTYPES:
            for dropout in (0.25, 0.1):
                seed = seed_of(2**61 + 12345, variant.device)
                kept = forward(random(shape, dtype, variant.device), None, dropout, seed, True)[2]
                wanted = references._kept(torch.empty(shape, dtype=F32, device="cpu"), dropout, seed.cpu())
                assert torch.equal(kept.cpu().bool(), wanted)
                other = forward(random(shape, dtype, variant.device), None, dropout, seed + 1, True)[2]
                assert not torch.equal(other, kept) or kept.numel() < 100


@pytest.mark.parametrize("dropout", [0.1, 0.5, 1e-4, 0.9999, 3e-6])
def test_how_often_dropout_keeps(dropout):
    """As often as was said, near 0 and 1 too, where 16 bits of a random number are too few; neighbours do not know
    of each other."""
    keep = min(round((1 - dropout) * 2**32), 2**32 - 1)
    assert abs(keep / 2**32 - (1 - dropout)) < 2**-31
    n = 2**22
    kept = references._kept(torch.empty(n, dtype=F32, device="cpu"), dropout, seed_of(7, "cpu")).double()
    deviation = (dropout * (1 - dropout) / n) ** 0.5
    assert abs(kept.mean().item() - (1 - dropout)) < 5 * deviation
    for apart in (1, 2, 8, 16):
        both = (kept[apart:] * kept[:-apart]).mean().item()
        assert abs(both - (1 - dropout) ** 2) < 10 * deviation
    for place in range(8):
        assert abs(kept[place::8].mean().item() - (1 - dropout)) < 15 * deviation


def test_keep_rounds_at_random():
    """A probability between two multiples of 2^-16 is met exactly on average: over all roundings of one border."""
    from apex.reference import _philox

    counter = torch.arange(2**20, dtype=torch.int64, device="cpu")
    few = 3 << 16 | 0x8000  # 3.5 of 65536
    kept = _philox.keep_eight_finely(torch.tensor(5, dtype=torch.int64, device="cpu"), counter, few).double()
    expected = few / 2**32
    assert abs(kept.mean().item() - expected) < 5 * (expected / kept.numel()) ** 0.5


def test_extremes_of_dropout(variant):
    x = random((3, 40), F32, variant.device)
    output, softmax, kept, dx = check(x, None, 1.0)
    assert output.eq(0).all() and kept.eq(0).all() and dx.eq(0).all() and softmax.sum(-1).gt(0.99).all()
    assert check(x, None, 1e-12)[2].float().mean() > 0.9
    assert forward(x, None, 0.0, None, True)[2].eq(1).all()


def test_replays(variant):
    """The same seed, the same bits; the backward finds the mask again from the seed alone."""
    x = random((2, 3, 5, 72), F16, variant.device)
    first, second = check(x, None, 0.3, 5), check(x, None, 0.3, 5)
    lists.assert_same_bits(first, second)
    assert not torch.equal(first[2], check(x, None, 0.3, 6)[2])


def test_refusals(variant):
    device, x = variant.device, random((2, 4), F32, variant.device)
    seed = seed_of(1, device)
    backward = torch.ops.apex.masked_softmax_dropout_backward
    with pytest.raises(TypeError, match="takes float32, float16, bfloat16 and float64, not"):
        forward(x.int())
    with pytest.raises(
        TypeError, match="the mask is bool or uint8, true where a key is left out, or of floating"
    ):
        forward(x, x.int())
    with pytest.raises(ValueError, match="does not broadcast to the input's"):
        forward(x, x[:, :3] > 0)
    for dropout in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="probability must be between 0 and 1, not"):
            forward(x, None, dropout, seed)
    for bad in (None, seed.int(), torch.cat((seed, seed))):
        with pytest.raises(ValueError, match="dropout needs a seed, one int64"):
            forward(x, None, 0.5, bad)
    with pytest.raises(ValueError, match="gradient has shape .* not the output's"):
        backward(x[:1], x)
    with pytest.raises(TypeError, match="gradient has dtype .* not the output's"):
        backward(x.half(), x)
    with pytest.raises(ValueError, match="what was kept has shape"):
        backward(x, x, x[:1] > 0)
    with pytest.raises(TypeError, match="what was kept is uint8 or bool"):
        backward(x, x, x)
    with pytest.raises(ValueError, match="dropout needs a seed"):
        backward(x, x, None, 0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_of_the_softmax(variant, dtype):
    """Alone, and beside the output's: both go through one node."""
    mask, seed = random_mask((2, 1, 3, 40), variant.device), seed_of(3, variant.device)
    for of_output in (0.0, 1.0):
        x = random((2, 2, 3, 40), dtype, variant.device).requires_grad_()
        output, softmax, kept = forward(x, mask, 0.25, seed, True)
        g, h = (random(x.shape, dtype, variant.device, value) for value in (5, 6))
        results, of = ([softmax, output], [h, g]) if of_output else ([softmax], [h])
        (found,) = torch.autograd.grad(results, x, of)
        of = g.cpu().to(F64) * kept.cpu() / 0.75 * of_output + h.cpu().to(F64)
        wanted = softmaxes.exact_gradient(softmax, of, 1.0)
        unit = 4 * lists.ROUNDING[dtype] * of.abs().max().item()  # of each of two gradients, and of their sum
        torch.testing.assert_close(found.cpu().to(F64), wanted, rtol=unit, atol=unit)


def test_opcheck():
    x, seed = random((2, 3, 4, 8), F32, "cpu").requires_grad_(), seed_of(1, "cpu")
    op = torch.ops.apex.masked_softmax_dropout_forward.default
    opcheck(op, (x, random_mask((2, 1, 1, 8), "cpu"), 0.5, seed, True))
    opcheck(op, (x, random((4, 8), F32, "cpu")))
    y = torch.softmax(x.detach(), -1)
    opcheck(torch.ops.apex.masked_softmax_dropout_backward.default, (y, y, None, 0.5, seed))


@pytest.mark.gpu
def test_more_than_2_31_elements():
    """Rows past element 2^31 are where they belong, mask and random numbers too."""
    rows, keys = 2**22 + 8, 512
    x = torch.randn(rows, keys, dtype=F16, device="cuda")
    seed = seed_of(3, "cuda")
    output, softmax, kept = forward(x, None, 0.25, seed, True)
    tail = x[-64:]
    near(softmax[-64:], softmaxes.exact(tail, None, 1.0), float(tail.abs().max()))
    assert torch.equal(output[-64:] != 0, kept[-64:].bool() & (softmax[-64:] != 0) & (output[-64:] != 0))
    counter = torch.arange((rows - 64) * keys // 8, rows * keys // 8, dtype=torch.int64, device="cpu")
    from apex.reference import _philox

    wanted = _philox.keep_eight_finely(seed[0].cpu(), counter, round(0.75 * 2**32)).view(64, keys)
    assert torch.equal(kept[-64:].cpu().bool(), wanted)
    dx = torch.ops.apex.masked_softmax_dropout_backward(output, softmax, None, 0.25, seed)
    near_gradient(dx[-64:], softmax[-64:], torch.where(kept[-64:].bool(), output[-64:], 0), 4 / 3)
