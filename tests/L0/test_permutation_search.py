"""apex.contrib.sparsity.permutation_search_kernels: searches against all orders of small matrices, and their parts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from lists import F32, F64

from apex.contrib.sparsity import permutation_search_kernels as kernels
from apex.contrib.sparsity.permutation_search_kernels import (
    _magnitudes,
    channel_swap,
    exhaustive_search,
    permutation_utilities,
)
from apex.contrib.sparsity.permutation_search_kernels.call_permutation_search_kernels import (
    accelerated_search_for_good_permutation,
)


def matrix(rows, columns, seed=0, dtype=F32):
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(rows, columns, dtype=dtype, device="cpu", generator=generator)


def kept(x):
    """What 2:4 keeps, by sorting."""
    return x.double().abs().reshape(-1, 4).sort(1).values[:, 2:].sum().item()


def splits(columns):
    """Every way to split the columns into fours, one at a time."""
    if not columns:
        yield []
    for chosen in itertools.combinations(columns[1:], 3) if columns else ():
        for rest in splits([c for c in columns[1:] if c not in chosen]):
            yield [columns[0], *chosen, *rest]


@pytest.mark.parametrize("count", [8, 12])
def test_searching_all_columns_finds_the_best_of_all_orders(count):
    x = matrix(6, count, seed=count)
    best = max(splits(list(range(count))), key=lambda order: kept(x[:, order]))
    result, _, order, gain = exhaustive_search.search_matrix(x, 4)
    assert kept(x[:, order]) == pytest.approx(kept(x[:, best]), rel=1e-6)
    assert gain == pytest.approx(kept(x[:, best]) - kept(x), rel=1e-4) and torch.equal(result, x[:, order])


def test_orders_are_unique_and_whole():
    for count in (4, 8, 12, 16):
        assert len(_magnitudes.splits(count)) == exhaustive_search.predict_unique_combinations(count, 4)
    assert exhaustive_search.generate_all_unique_combinations(8, 4) == list(splits(list(range(8))))
    built = []
    exhaustive_search.generate_unique_combinations([0], list(range(1, 8)), built, 4)
    assert built == list(splits(list(range(8))))
    assert exhaustive_search.generate_all_unique_combinations(6, 2)[-1] == [0, 5, 1, 4, 2, 3]
    sixteen = _magnitudes.splits(16)
    assert torch.equal(sixteen[0], torch.arange(16, dtype=torch.int64, device="cpu"))
    assert torch.equal(sixteen[::9973].sort(1).values, sixteen[:1].expand(len(sixteen[::9973]), -1))


@pytest.mark.parametrize("count", [8, 12, 16])
def test_sums_of_fours(count):
    columns = matrix(7, 40, seed=1)
    groups = torch.tensor(
        [list(range(count)), list(range(39, 39 - count, -1))], dtype=torch.int32, device="cpu"
    )
    found = _magnitudes.sums_of_fours(_magnitudes.columns_of(columns), groups)
    for group, sums in zip(groups.tolist(), found, strict=True):
        wanted = [
            kept(columns[:, [group[i] for i in four]]) for four in itertools.combinations(range(count), 4)
        ]
        np.testing.assert_allclose(sums.numpy(), wanted, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stripe_group_size": 12, "escape_attempts": 2},
        {"strategy": "progressive channel swap", "progressive_search_time_limit": 60},
    ],
    ids=["8", "12", "progressive"],
)
def test_a_search_keeps_more_and_is_repeatable(options):
    x = matrix(32, 40, seed=2)
    x[:, ::2] *= 10  # what is large lies in half of the columns
    order = accelerated_search_for_good_permutation(x, options)
    assert sorted(order) == list(range(40)) and order == accelerated_search_for_good_permutation(x, options)
    assert kept(x[:, order]) > 1.005 * kept(x)
    state = torch.random.get_rng_state()
    accelerated_search_for_good_permutation(x, options)
    assert torch.equal(state, torch.random.get_rng_state())


def test_no_pair_of_stripes_is_left_to_improve():
    x = matrix(20, 24, seed=4)
    order = accelerated_search_for_good_permutation(x, {"escape_attempts": 0})
    stripe_map, _, _ = exhaustive_search.build_stripe_map(x[:, order], 4, 8, [], [], [], [])
    assert max(stripe_map) < 1e-4 * kept(x)


def test_attempts_to_escape_never_lose():
    x = matrix(24, 32, seed=5)
    few, many = (
        kept(x[:, accelerated_search_for_good_permutation(x, {"escape_attempts": n})]) for n in (0, 30)
    )
    assert many >= few


def test_stripe_maps_as_lists():
    x = matrix(10, 16, seed=6).numpy()
    stripe_map, ids, orders = exhaustive_search.build_stripe_map(x, 4, 8, [], [], [], [])
    assert ids == [list(pair) for pair in itertools.combinations(range(4), 2)]
    for gain, pair, order in zip(stripe_map, ids, orders, strict=True):
        part = torch.from_numpy(exhaustive_search.collect_stripes(x, pair, 4))
        best = max(kept(part[:, way]) for way in splits(list(range(8))))
        assert kept(part[:, order]) == pytest.approx(best, rel=1e-6)
        assert gain == pytest.approx(best - kept(part), rel=1e-3, abs=1e-4)
    before = x.copy()
    made, count, *_, used, gained, order = exhaustive_search.use_stripe_map(
        x, 4, stripe_map, ids, orders, list(range(16))
    )
    assert made is x and 2 * count == len(used) and np.array_equal(before[:, order], x)
    assert gained == pytest.approx(kept(torch.from_numpy(x)) - kept(torch.from_numpy(before)), rel=1e-3)
    exhaustive_search.build_stripe_map(x, 4, 8, stripe_map, ids, orders, used)
    assert max(stripe_map) >= 0


def test_exhaustive_search_takes_what_it_is_given():
    x = matrix(9, 16, seed=7, dtype=F64)
    as_tensor = exhaustive_search.Exhaustive_Search(x, 8, 3)
    as_array = exhaustive_search.Exhaustive_Search(x.numpy(), 8, 3)
    assert isinstance(as_array[0], np.ndarray) and torch.equal(as_tensor[0], x[:, as_tensor[2]])
    before = [15 - i for i in range(16)]
    again = exhaustive_search.Exhaustive_Search(x[:, before], 8, 0, permutation=before)
    assert torch.equal(again[0], x[:, again[2]])


def test_swaps():
    x = matrix(8, 12, seed=8)
    gains = channel_swap.compute_swap_map(x, range(3))
    assert len(gains) == 3 * 16
    for (one, two), gain in gains.items():
        order = list(range(12))
        order[one], order[two] = two, one
        assert gain == pytest.approx(kept(x[:, order]) - kept(x), abs=1e-4)
        assert permutation_utilities.try_swap(x, one, two)[1] == pytest.approx(gain, abs=1e-4)
        stripes = channel_swap.columns_to_stripes_and_swap_idx(one, two)
        assert channel_swap.stripes_and_swap_idx_to_columns(*stripes) == (one, two)
    swap_map, swap_ids = channel_swap.build_swap_map(x, [], [], [], 0)
    y, before = x.clone(), list(range(12))
    y, swaps, *_, used, gained, _, order = channel_swap.use_swap_map(
        y, swap_map, swap_ids, 1e-5, 0, 0, before, 0
    )
    assert swaps == 1 and len(used) == 2 and torch.equal(y, x[:, order])
    assert gained == pytest.approx(max(gains.values())) and kept(y) == pytest.approx(
        kept(x) + gained, rel=1e-5
    )
    result, _, order = channel_swap.Channel_Swap(x.numpy(), escape_attempts=3)
    assert np.array_equal(result, x.numpy()[:, order]) and kept(torch.from_numpy(result)) > kept(x)
    assert channel_swap.build_stripe_pairs(x, [1]) == [[0, 1], [1, 2]]


def test_utilities():
    x = matrix(6, 16, seed=9).numpy()
    assert kernels.sum_after_2_to_4(x) == pytest.approx(kept(torch.from_numpy(x)))
    pruned = permutation_utilities.apply_2_to_4(x.copy())
    assert (np.count_nonzero(pruned.reshape(-1, 4), axis=1) == 2).all()
    assert np.abs(pruned).sum() == pytest.approx(kept(torch.from_numpy(x)), rel=1e-6)
    order = [3, 2, 1, 0, *range(4, 16)]
    assert permutation_utilities.find_permutation(x[:, order], x) == order
    gain, best = permutation_utilities.try_permutations_on_matrix(x, [list(range(16)), order[::-1], order])
    assert gain == pytest.approx(0, abs=1e-5) and sorted(best) == list(range(16))
    assert permutation_utilities.magnitude_after_pruning_rows(x) >= kept(torch.from_numpy(x))
    assert np.count_nonzero(permutation_utilities.unstructured_prune(x, 0.5)) == 48
    assert permutation_utilities.efficacy(1.0, 3.0, 2.0) == 0.5
    a, b = [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 4, 3, 5, 6, 7]
    assert permutation_utilities.group_differences(a, b) == [(4, 0, 1), (3, 1, 0)]
    assert permutation_utilities.dictify([(4, 0, 1), (3, 1, 0)]) == {(0, 1): [4], (1, 0): [3]}
    assert permutation_utilities.swap_and_correct(b, 3, 4) == a
    assert permutation_utilities.remove_common_groups([*a, 8, 9, 10, 11], [*b, 11, 10, 9, 8]) == (a, b)
    assert not permutation_utilities.use_gpu(False)


@pytest.mark.parametrize(
    "call, text",
    [
        (
            lambda: accelerated_search_for_good_permutation(matrix(4, 8), {"strategy": "guess"}),
            "no strategy 'guess'",
        ),
        (lambda: accelerated_search_for_good_permutation(matrix(4, 10)), "multiple of 4 columns"),
        (lambda: exhaustive_search.Exhaustive_Search(matrix(4, 20)), "20 columns are more than 16"),
        (lambda: exhaustive_search.Exhaustive_Search(matrix(4, 20), 16), "8 or 12 columns"),
        (lambda: exhaustive_search.search_matrix(matrix(4, 8), 2), "not of 2"),
        (lambda: exhaustive_search.predict_unique_combinations(9, 4), "no groups of 4"),
        (lambda: exhaustive_search.generate_all_unique_combinations(20, 4), "too many to list"),
    ],
)
def test_refused(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_tables_are_made_outside_of_the_callers_modes():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    tables = [_magnitudes._table(lambda: torch.ones(3, dtype=F32, device="cpu")) for _ in range(3)]
    with FakeTensorMode():
        tables[0]()
    with torch.inference_mode():
        tables[1]()
    torch.func.functionalize(lambda x: x + len(tables[2]()))(matrix(1, 1))
    for table in tables:
        made = table()
        assert not isinstance(made, FakeTensor) and not made.is_inference()
        assert not torch._is_functional_tensor(made) and made.tolist() == [1, 1, 1]
    failing = _magnitudes._table(lambda: torch.ones(-1, dtype=F32, device="cpu"))
    with pytest.raises(RuntimeError, match="negative"):
        failing()


SPECIAL = {
    "nan": lambda x: x.index_fill_(1, torch.tensor([3], dtype=torch.int64, device="cpu"), float("nan")),
    "inf": lambda x: x.index_fill_(1, torch.tensor([3], dtype=torch.int64, device="cpu"), float("inf")),
    "overflow": lambda x: x.mul_(3e37),
    "all_nan": lambda x: x.fill_(float("nan")),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_searches_of_what_is_not_finite_end(name):
    x = SPECIAL[name](matrix(64, 16))
    for found in (
        accelerated_search_for_good_permutation(x, {"escape_attempts": 2}),
        channel_swap.Channel_Swap(x, 1)[2],
    ):
        assert sorted(found) == list(range(16))
    if name == "overflow":
        best = accelerated_search_for_good_permutation(x, {"escape_attempts": 2})
        assert best == accelerated_search_for_good_permutation(x * 2.0**-100, {"escape_attempts": 2})


ordered = permutation_utilities.try_permutations_on_matrix


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: channel_swap.Channel_Swap(matrix(4, 16), -1), ValueError, "escape_attempts"),
        (lambda: channel_swap.Channel_Swap(matrix(4, 16), 2.5), TypeError, "integer"),
        (lambda: kernels.sum_after_2_to_4(matrix(4, 4).to(torch.complex64)), TypeError, "real weights"),
        (lambda: _magnitudes.columns_of(matrix(4, 4).to(torch.complex64)), TypeError, "real weights"),
        (lambda: ordered(matrix(4, 8), []), ValueError, "permutations are"),
        (lambda: ordered(matrix(4, 8), [[0] * 8]), ValueError, "each of the 8 columns once"),
        (lambda: permutation_utilities.unstructured_prune(matrix(4, 8), 2.0), ValueError, "fraction"),
        (lambda: permutation_utilities.magnitude_after_pruning_rows(matrix(4, 8), -0.5), ValueError, "fraction"),
    ],
)  # fmt: skip
def test_what_cannot_be_searched_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_pruning_leaves_no_nan_and_takes_any_layout():
    inf = float("inf")
    x = torch.tensor([[inf, inf, inf, 1.0]], dtype=F32, device="cpu")
    assert permutation_utilities.apply_2_to_4(x).tolist() == [[inf, inf, 0, 0]]
    turned = matrix(8, 4).t()
    assert (permutation_utilities.unstructured_prune(turned, 0.5) == 0).sum() == 16
    assert (permutation_utilities.unstructured_prune(np.asfortranarray(turned.numpy()), 0.5) == 0).sum() == 16
    assert exhaustive_search.generate_all_unique_combinations(0, 4) == [[]]
    assert (
        kernels.sum_after_2_to_4(torch.tensor([[2**24 + 1, 0, 0, 0]], dtype=torch.int64, device="cpu"))
        == 2**24 + 1
    )
