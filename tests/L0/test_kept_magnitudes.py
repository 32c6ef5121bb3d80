"""kept_magnitudes on every variant of this machine against float64; permutation_search_cuda, which is made of it."""

from __future__ import annotations

import itertools

import pytest
import torch
from lists import F32, F64

from apex._legacy import permutation_search_cuda
from apex.reference import kept_magnitudes as reference

kept_magnitudes = torch.ops.apex.kept_magnitudes
I32 = torch.int32


def random(*shape, seed=0):
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, dtype=F32, device="cpu", generator=generator)


def picked(count, many, seed=1):
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(0, count, (many, 8), dtype=I32, device="cpu", generator=generator)


def wanted(columns, groups):
    """By sorting, in float64."""
    x = columns.double().abs().cpu()[groups.long().cpu()]
    return torch.stack([x[:, list(four)].sort(1).values[:, 2:].sum((1, 2)) for four in reference.FOURS], 1)


@pytest.mark.parametrize("rows", [1, 7, 16, 200])
def test_values(variant, rows):
    columns, groups = random(24, rows).to(variant.device), picked(24, 9).to(variant.device)
    found = kept_magnitudes(columns, groups)
    assert found.dtype == F32 and found.shape == (9, 70)
    torch.testing.assert_close(found.double().cpu(), wanted(columns, groups), rtol=2e-6, atol=0)


def test_layouts_and_sizes(variant):
    """Transposed weights, slices of groups, and nothing at all."""
    weight, groups = random(50, 16).to(variant.device), picked(16, 8).to(variant.device)
    torch.testing.assert_close(
        kept_magnitudes(weight.t(), groups[::2]).double().cpu(),
        wanted(weight.t(), groups[::2]),
        rtol=2e-6,
        atol=0,
    )
    assert kept_magnitudes(weight.t(), groups[:0]).shape == (0, 70)
    assert not kept_magnitudes(weight[:0].t(), groups).any()


@pytest.mark.parametrize("outside", [16, -1])
def test_indices_outside(variant, outside):
    columns, groups = random(16, 30).to(variant.device), picked(16, 4).to(variant.device)
    groups[2, 5] = outside
    if variant.device.type == "cpu":
        with pytest.raises(IndexError, match=rf"groups\[2\] has the index {outside}, outside \[0, 16\)"):
            kept_magnitudes(columns, groups)
    else:
        assert kept_magnitudes(columns, groups).isnan().any(1).tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    "columns, groups, error, text",
    [
        (random(16, 4).double(), picked(16, 2), TypeError, "takes float32, not"),
        (random(16, 4), picked(16, 2).long(), TypeError, "groups are int32, not"),
        (random(16, 4), picked(16, 2)[:, :7], ValueError, "do not fit"),
        (random(16), picked(16, 2), ValueError, "do not fit"),
    ],
)
def test_refused(variant, columns, groups, error, text):
    with pytest.raises(error, match=text):
        kept_magnitudes(columns.to(variant.device), groups.to(variant.device))


# ---- permutation_search_cuda -------------------------------------------------------------------------


def kept(x):
    return x.double().abs().reshape(-1, 4).sort(1).values[:, 2:].sum().item()


def splits(columns):
    """Every way to split eight columns into two fours; the first leaves them."""
    for chosen in itertools.combinations(columns[1:], 3):
        yield [columns[0], *chosen, *[c for c in columns[1:] if c not in chosen]]


def as_given(tensor, kind):
    """What a caller of public apex's extension gives: a numpy array; tensors are taken as well."""
    return tensor.flatten().clone() if kind == "tensor" else tensor.flatten().clone().numpy()


@pytest.mark.parametrize("kind", ["tensor", "numpy"])
def test_sum_after_2_to_4(variant, kind):
    variant.mixed = True
    x, out = random(10, 24), as_given(torch.zeros(1, dtype=F32, device="cpu"), kind)
    assert permutation_search_cuda.sum_after_2_to_4(as_given(x, kind), 10, 24, 4, 20, 2, 32, out) == 0
    assert out[0].item() == pytest.approx(kept(x[:, 4:20]), rel=1e-6)


@pytest.mark.parametrize("kind", ["tensor", "numpy"])
def test_build_permute_map(variant, kind):
    x = random(12, 16, seed=3)
    orders = torch.tensor(list(splits(list(range(8)))), dtype=I32, device="cpu")
    stripes = torch.tensor([[0, 1], [3, 1]], dtype=I32, device="cpu")
    gains, best = (as_given(torch.zeros(2, dtype=t, device="cpu"), kind) for t in (F32, I32))
    permutation_search_cuda.build_permute_map(
        as_given(x, kind), 12, 16, as_given(stripes, kind), 2, 2, as_given(orders, kind), 8, gains, best
    )
    for group, gain, which in zip(stripes.tolist(), gains, best, strict=True):
        part = torch.cat([x[:, 4 * s : 4 * s + 4] for s in group], 1)
        totals = [kept(part[:, order]) for order in orders.tolist()]
        assert totals[int(which)] == pytest.approx(max(totals), rel=1e-6)
        assert float(gain) == pytest.approx(max(totals) - totals[0], abs=1e-4)


@pytest.mark.parametrize("width", [2, 3, 5], ids=["8", "12", "20"])
def test_check_permutations(variant, width):
    variant.mixed = True
    x = random(9, 4 * width, seed=4)
    generator = torch.Generator("cpu").manual_seed(5)
    orders = torch.stack([torch.arange(4 * width, dtype=torch.int64, device="cpu")] + [
        torch.randperm(4 * width, generator=generator, dtype=torch.int64, device="cpu") for _ in range(6)
    ]).int()  # fmt: skip
    gain, best = torch.zeros(1, dtype=F32, device="cpu"), torch.zeros(1, dtype=I32, device="cpu")
    stripes = torch.arange(width, dtype=I32, device="cpu")
    permutation_search_cuda.check_permutations(
        x.flatten(), 9, 4 * width, stripes, width, 1, orders.flatten(), len(orders), gain, best
    )
    totals = [kept(x[:, order]) for order in orders.tolist()]
    assert totals[best.item()] == pytest.approx(max(totals), rel=1e-6)
    assert gain.item() == pytest.approx(max(totals) - totals[0], abs=1e-4)


@pytest.mark.parametrize("kind", ["tensor", "numpy"])
def test_build_swap_map(variant, kind):
    x = random(11, 12, seed=6)
    pairs = torch.tensor([[0, 1], [2, 0]], dtype=I32, device="cpu")
    out = as_given(torch.zeros(2, 16, dtype=F32, device="cpu"), kind)
    permutation_search_cuda.build_swap_map(as_given(x, kind), 11, 12, as_given(pairs, kind), out)
    for (one, two), gains in zip(
        pairs.tolist(), torch.as_tensor(out, dtype=F32, device="cpu").view(2, 16), strict=True
    ):
        for swap, gain in enumerate(gains.tolist()):
            order = list(range(12))
            a, b = 4 * one + swap // 4, 4 * two + swap % 4
            order[a], order[b] = b, a
            assert gain == pytest.approx(kept(x[:, order]) - kept(x), abs=1e-4)


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda m, x, out: m.sum_after_2_to_4(x, 4, 6, 0, 4, 1, 32, out), "multiple of 4 columns"),
        (
            lambda m, x, out: m.sum_after_2_to_4(x, 5, 8, 0, 8, 1, 32, out),
            "matrix has 32 elements, not 5 x 8",
        ),
        (lambda m, x, out: m.sum_after_2_to_4(x, 4, 8, 0, 12, 1, 32, out), r"columns \[0, 12\) of 8"),
        (lambda m, x, out: m.build_swap_map(x, 4, 8, [0, 2], out), r"stripes are in \[0, 2\)"),
        (lambda m, x, out: m.build_swap_map(x, 4, 8, [0, 1], out), "output has 1 elements, not 16"),
        (lambda m, x, out: m.build_permute_map(x, 4, 8, [0, 1], 1, 2, [0] * 8, 8, out, out), "each order"),
    ],
)
def test_legacy_refused(call, text):
    with pytest.raises(ValueError, match=text):
        call(permutation_search_cuda, random(32), torch.zeros(1, dtype=F64, device="cpu"))
