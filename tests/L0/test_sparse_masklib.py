"""apex.contrib.sparsity.sparse_masklib: masks against all patterns of small matrices, and by their definition."""

from __future__ import annotations

import itertools

import pytest
import torch
from lists import BF16, F16, F32, F64

from apex.contrib.sparsity import create_mask, sparse_masklib

DTYPES = [F16, BF16, F32, F64]


def matrix(*shape, dtype=F32, seed=0):
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, dtype=F64, device="cpu", generator=generator).to(dtype)


def rows_of(m, n):
    """All rows of m zeros and ones with n ones."""
    return [row for row in itertools.product((0, 1), repeat=m) if sum(row) == n]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m, n", [(4, 2), (4, 1), (8, 4), (3, 3)])
def test_1d_is_the_best_of_all_patterns(dtype, m, n):
    x = matrix(5, 3 * m, dtype=dtype)
    mask = sparse_masklib.mn_1d_best(x, m, n)
    assert mask.dtype == torch.int32 and mask.shape == x.shape
    for group, chosen in zip(x.abs().double().view(-1, m).tolist(), mask.view(-1, m).tolist(), strict=True):
        best = max(sum(a * b for a, b in zip(group, row, strict=True)) for row in rows_of(m, n))
        assert sum(chosen) == n and sum(a * b for a, b in zip(group, chosen, strict=True)) == best


def test_1d_keeps_the_first_of_equal_magnitudes_and_nan_first():
    x = torch.tensor(
        [[1.0, -1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0], [9.0, 1.0, float("nan"), 8.0]], dtype=F32, device="cpu"
    )
    assert sparse_masklib.m4n2_1d(x, 0.5).tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0]]


def test_1d_of_float64_is_not_rounded():
    x = torch.tensor([[1.0, 1.0 + 1e-12, 1.0 + 2e-12, 0.0]], dtype=F64, device="cpu")
    assert create_mask(x).tolist() == [[0.0, 1.0, 1.0, 0.0]]


def test_1d_columns_that_4_does_not_divide():
    """A last group of two or fewer columns is kept whole, one of three loses its smallest."""
    x = torch.tensor([[4.0, 3.0, 2.0, 1.0, 1.0, 3.0, 2.0]], dtype=F32, device="cpu")
    assert sparse_masklib.m4n2_1d(x, 0.5).tolist() == [[1, 1, 0, 0, 0, 1, 1]]
    assert sparse_masklib.m4n2_1d(x[:, :6].contiguous(), 0.5).tolist() == [[1, 1, 0, 0, 1, 1]]
    padded, shape = sparse_masklib.reshape_1d(x, 4)
    assert shape == (1, 8) and padded.tolist() == [[4, 3, 2, 1], [1, 3, 2, 0]]


def test_2d_best_is_the_best_of_all_patterns():
    """All 4 x 4 blocks with two ones in every row and column are made here from all sixteen bits."""
    valid = [
        block
        for block in itertools.product(rows_of(4, 2), repeat=4)
        if all(sum(column) == 2 for column in zip(*block, strict=True))
    ]
    assert len(valid) == 90 == len(sparse_masklib.compute_valid_2d_patterns(4, 2))
    x = matrix(8, 12, seed=3)
    mask = sparse_masklib.m4n2_2d_best(x, 0.5)
    for i, j in itertools.product(range(0, 8, 4), range(0, 12, 4)):
        block, chosen = x[i : i + 4, j : j + 4].abs().double(), mask[i : i + 4, j : j + 4]
        patterns = torch.tensor(valid, dtype=F64, device="cpu")
        assert tuple(map(tuple, chosen.tolist())) in valid
        assert (block * chosen).sum().item() == pytest.approx(
            (patterns * block).sum((1, 2)).max().item(), rel=1e-14
        )


def greedy(block, m, n):
    """One block's mask, element by element."""
    kept = [[0] * m for _ in range(m)]
    order = sorted(range(m * m), key=lambda place: (block[place // m][place % m], place), reverse=True)
    for place in order:
        row, column = divmod(place, m)
        if sum(kept[row]) < n and sum(line[column] for line in kept) < n:
            kept[row][column] = 1
    return kept


@pytest.mark.parametrize("m, n", [(4, 2), (4, 1), (6, 3)])
def test_2d_greedy_by_its_definition(m, n):
    x = matrix(2 * m, 3 * m, seed=1).mul(4).round()  # many are equal
    mask = sparse_masklib.mn_2d_greedy(x, m, n)
    for i, j in itertools.product(range(0, 2 * m, m), range(0, 3 * m, m)):
        wanted = greedy(x[i : i + m, j : j + m].abs().tolist(), m, n)
        assert mask[i : i + m, j : j + m].tolist() == wanted


@pytest.mark.parametrize("pattern", ["m4n2_2d_greedy", "m4n2_2d_best"])
def test_2d_keeps_what_lies_beyond_whole_blocks(pattern):
    mask = create_mask(matrix(9, 6, dtype=BF16), pattern)
    assert mask[8].all() and mask[:, 4:].all() and mask.dtype == BF16
    assert 14 <= mask[:8, :4].sum() <= 16  # the greedy choice can come to fewer than half
    assert create_mask(matrix(3, 3), pattern).all()


@pytest.mark.parametrize("pattern", ["m4n2_1d", "m4n2_2d_greedy", "m4n2_2d_best"])
@pytest.mark.parametrize("shape", [(16,), (8, 16), (8, 16, 3), (8, 16, 3, 5), (8, 16, 2, 1, 3)], ids=str)
def test_create_mask_goes_along_input_channels(shape, pattern):
    x = matrix(*shape, dtype=F16)
    mask = create_mask(x, pattern)
    assert mask.shape == x.shape and mask.dtype == x.dtype
    if pattern == "m4n2_1d" or len(shape) > 1:
        along = mask if len(shape) == 1 else mask.movedim(1, -1)
        sums = along.reshape(-1, 4).sum(1)
        assert (sums <= 2).all() and (pattern == "m4n2_2d_greedy" or (sums == 2).all())
    if pattern != "m4n2_1d" and len(shape) in (2, 4, 5):  # along output channels, too
        sums = mask.movedim(0, -1).reshape(-1, 4).sum(1)
        assert (sums <= 2).all()


def test_a_convolution_is_masked_as_each_of_its_positions():
    x = matrix(8, 16, 3, 3)
    mask = create_mask(x, "m4n2_2d_best")
    for r, s in itertools.product(range(3), repeat=2):
        assert torch.equal(mask[:, :, r, s], create_mask(x[:, :, r, s].contiguous(), "m4n2_2d_best"))


def test_patterns_and_fill():
    patterns = sparse_masklib.compute_valid_1d_patterns(4, 2)
    assert sorted(map(tuple, patterns.int().tolist())) == sorted(rows_of(4, 2))
    patterns.zero_()  # the caller's own
    assert sparse_masklib.compute_valid_1d_patterns(4, 2).sum() == 12
    assert sparse_masklib.fill(torch.tensor([0.0, 2.0, 0.0, 1.0], dtype=F32, device="cpu")) == 0.5


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: create_mask(matrix(4, 4), "m8n2_1d"), ValueError, "no pattern 'm8n2_1d': there are m4n2_1d"),
        (lambda: create_mask(torch.ones(4, 4, dtype=torch.int32, device="cpu")), TypeError, "not of torch.int32"),
        (lambda: create_mask(torch.ones((), dtype=F32, device="cpu")), ValueError, "1 to 5 dimensions"),
        (lambda: sparse_masklib.mn_1d_best(matrix(2, 4, 4), 4, 2), ValueError, r"not of shape \(2, 4, 4\)"),
        (lambda: sparse_masklib.mn_1d_best(matrix(4, 4), 4, 5), ValueError, "not 5 of 4"),
        (lambda: sparse_masklib.mn_2d_best(matrix(8, 8), 8, 4), ValueError, "too many patterns of 4 in 8"),
    ],
)  # fmt: skip
def test_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_tracing_leaves_nothing_behind():
    """What is made while fake tensors, an export, a transform or inference mode are on is of no use afterwards."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Masks(torch.nn.Module):
        def forward(self, x):
            return create_mask(x, "m4n2_2d_best")

    x = matrix(8, 16)
    wanted = create_mask(x, "m4n2_2d_best")
    sparse_masklib._patterns_2d.cache_clear()
    torch.export.export(Masks(), (x,))
    with FakeTensorMode() as mode:
        create_mask(mode.from_tensor(x), "m4n2_2d_best")
        sparse_masklib.compute_valid_1d_patterns(4, 2)
    torch.func.functionalize(Masks())(x)
    assert torch.equal(create_mask(x, "m4n2_2d_best"), wanted) and wanted.mean() == 0.5
    assert sparse_masklib.compute_valid_1d_patterns(4, 2).sum() == 12


def test_2d_best_of_numbers_that_float32_does_not_hold():
    """The mask does not depend on the scale, and infinities come before everything else."""
    x = matrix(8, 16, dtype=F64)
    wanted = create_mask(x, "m4n2_2d_best")
    for scale in (1e40, 1e307, 1e-300):
        assert torch.equal(create_mask(x * scale, "m4n2_2d_best"), wanted)
    x[0, :4] = torch.tensor([float("inf"), 1e308, 1.0, float("inf")], dtype=F64, device="cpu")
    assert create_mask(x, "m4n2_2d_best")[0, :4].tolist() == [1, 0, 0, 1]


def test_integers_are_compared_exactly():
    x = torch.tensor(
        [[2**24 + 1, 2**24, 2**24 + 2, 0], [-(2**63), 2**53 + 1, 2**53, 1]], dtype=torch.int64, device="cpu"
    )
    assert sparse_masklib.mn_1d_best(x, 4, 2).tolist() == [[1, 0, 1, 0], [1, 1, 0, 0]]


@pytest.mark.parametrize("shape", [(8, 0), (0,), (8, 0, 3, 3), (0, 16)], ids=str)
@pytest.mark.parametrize("pattern", ["m4n2_1d", "m4n2_2d_best", "m4n2_2d_greedy"])
def test_no_elements(shape, pattern):
    assert create_mask(torch.empty(shape, dtype=F32, device="cpu"), pattern).shape == shape


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: create_mask([1.0, 2.0]), TypeError, "takes a tensor"),
        (lambda: create_mask(matrix(4, 4), ["m4n2_1d"]), TypeError, "pattern's name"),
        (lambda: sparse_masklib.fill(matrix(0, 4)), ValueError, "no elements"),
        (
            lambda: sparse_masklib.mn_1d_best(matrix(2, 4).to(torch.complex64), 4, 2),
            TypeError,
            "real weights",
        ),
    ],
)
def test_what_is_no_weight_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()
