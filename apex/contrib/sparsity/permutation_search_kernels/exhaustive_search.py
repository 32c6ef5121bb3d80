"""Exhaustive search: every way to split a matrix's columns into fours, or those of a few stripes at a time."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from apex.contrib.sparsity.permutation_search_kernels import _magnitudes
from apex.contrib.sparsity.permutation_search_kernels._local_search import local_search

_MOST_AT_ONCE = 16  # columns: 2,627,625 ways to split them


def is_canonical(perm: Sequence[int], col: int) -> bool:
    """Whether an order that is sorted within its fours, and whose fours are sorted, remains so with `col` behind it."""
    if len(perm) % 4:
        return col > perm[-1]
    return not perm or (col > perm[-4] and set(range(col)) <= set(perm))


def generate_unique_combinations(
    built_permutation: list[int],
    remaining_columns: list[int],
    full_permutation_list: list[list[int]],
    group_width: int,
) -> None:
    """Appends to the list every sorted order (``is_canonical``) that begins with what is built."""
    if not remaining_columns:
        full_permutation_list.append(list(built_permutation))
    for index, column in enumerate(remaining_columns):
        if is_canonical(built_permutation, column):
            rest = remaining_columns[:index] + remaining_columns[index + 1 :]
            generate_unique_combinations(
                [*built_permutation, column], rest, full_permutation_list, group_width
            )


def generate_all_unique_combinations(C: int, M: int, must_use_all_groups: bool = False) -> list[list[int]]:
    """Every way to split C columns into groups of M, as orders: groups are sorted, and sorted among themselves.

    Raises ValueError where there are too many: above 16 columns in groups of 4, or 10 million.
    """
    ways = predict_unique_combinations(C, M)
    if not C:
        return [[]]
    if M == 4 and C <= _MOST_AT_ONCE:
        return _magnitudes.splits(C).tolist()
    if ways > 10_000_000:
        raise ValueError(f"there are {ways} ways to split {C} columns into groups of {M}: too many to list")

    def split(columns):
        if not columns:
            yield []
        for chosen in itertools.combinations(columns[1:], M - 1) if columns else ():
            rest = [column for column in columns[1:] if column not in chosen]
            for others in split(rest):
                yield [columns[0], *chosen, *others]

    return list(split(list(range(C))))


def predict_unique_combinations(C: int, M: int) -> int:
    """How many ways there are to split C columns into groups of M. Raises ValueError if M does not divide C."""
    if M <= 0 or C < 0 or C % M:
        raise ValueError(f"{C} columns are no groups of {M}")
    groups = C // M
    return math.factorial(C) // (math.factorial(M) ** groups * math.factorial(groups))


def _check_width(group_width):
    if group_width != 4:
        raise ValueError(f"groups are of 4 columns, for 2:4 sparsity, not of {group_width}")


def search_matrix(matrix: Any, group_width: int) -> tuple[Any, float, list[int], float]:
    """(the matrix in its best order, seconds, the order, how much more is kept): every way is tried.

    Raises ValueError above 16 columns: Exhaustive_Search with stripe_group_size=8 takes more.
    """
    _check_width(group_width)
    tensor, began = _magnitudes.as_tensor(matrix), time.perf_counter()
    count = tensor.shape[1]
    if count > _MOST_AT_ONCE:
        raise ValueError(
            f"{count} columns are more than {_MOST_AT_ONCE}, whose orders can all be tried: search with "
            "stripe_group_size=8, a few stripes at a time"
        )
    best, gain = list(range(count)), 0.0
    if count > 4:
        orders = _magnitudes.splits(count)
        group = torch.arange(count, dtype=torch.int32, device=tensor.device)[None]
        gains, which, _ = _magnitudes.best_orders(_magnitudes.columns_of(tensor), group, orders)
        best, gain = orders[which.item()].tolist(), gains.item()
    return matrix[:, best], time.perf_counter() - began, best, gain


def collect_stripes(matrix: Any, stripes: Iterable[int], group_width: int) -> Any:
    """The columns of these stripes, in a matrix of their own."""
    return matrix[:, [stripe * group_width + i for stripe in stripes for i in range(group_width)]]


def apply_stripe_group_permutation(
    sgp: Sequence[int], stripes: Sequence[int], group_width: int, permutation: Sequence[int]
) -> list[int]:
    """An order of all columns after the order `sgp` of those of some stripes."""
    places = [stripe * group_width + i for stripe in stripes for i in range(group_width)]
    made = list(permutation)
    for place, source in zip(places, sgp, strict=True):
        made[place] = permutation[places[source]]
    return made


def generate_stripe_groups(num_stripes: int, window_size: int) -> set[tuple[int, ...]]:
    """All groups of `window_size` stripes."""
    return set(itertools.combinations(range(num_stripes), window_size))


def build_stripe_map(
    matrix: Any,
    group_width: int,
    window_size: int,
    stripe_map: list[float],
    stripe_ids: list[list[int]],
    perm_map: list[list[int]],
    used_stripes: Iterable[int],
) -> tuple[list[float], list[list[int]], list[list[int]]]:
    """The gain (stripe_map), the stripes and the best order of every group of stripes with `window_size` columns.

    Lists that are not empty are those of a call before: groups without a stripe of `used_stripes` stay as they are.
    """
    _check_width(group_width)
    tensor, used = _magnitudes.as_tensor(matrix), set(used_stripes)
    if not stripe_ids:
        groups = sorted(generate_stripe_groups(tensor.shape[1] // 4, window_size // 4))
        stripe_ids += [list(group) for group in groups]
        stripe_map += [0.0] * len(groups)
        perm_map += [list(range(window_size)) for _ in groups]
        used = set(range(tensor.shape[1] // 4))
    need = [index for index, group in enumerate(stripe_ids) if not used.isdisjoint(group)]
    chosen = torch.tensor([stripe_ids[index] for index in need], dtype=torch.int32, device=tensor.device)
    groups = (4 * chosen[..., None] + torch.arange(4, dtype=torch.int32, device=tensor.device)).flatten(1)
    orders = _magnitudes.splits(window_size)
    if need:
        gains, which, _ = _magnitudes.best_orders(_magnitudes.columns_of(tensor), groups, orders)
        for index, gain, order in zip(need, gains.tolist(), orders[which].tolist(), strict=True):
            stripe_map[index], perm_map[index] = gain, order
    return stripe_map, stripe_ids, perm_map


def use_stripe_map(
    matrix: Any,
    group_width: int,
    stripe_map: list[float],
    stripe_ids: list[list[int]],
    perm_map: list[list[int]],
    permutation: list[int],
) -> tuple:
    """Gives groups their best orders, those of the largest gain first, as long as they share no stripe.

    Returns:
        the matrix, changed in place; how many groups; the three lists; the stripes that changed; the gain of all; and
        the order of all columns.
    """
    _check_width(group_width)
    used: list[int] = []
    count, improvement = 0, 0.0
    for index in sorted(range(len(stripe_map)), key=stripe_map.__getitem__, reverse=True):
        group, order = stripe_ids[index], perm_map[index]
        if stripe_map[index] <= 0:
            break
        if not set(used).isdisjoint(group):
            continue
        columns = [4 * stripe + i for stripe in group for i in range(4)]
        matrix[:, columns] = matrix[:, [columns[i] for i in order]]
        permutation = apply_stripe_group_permutation(order, group, 4, permutation)
        used += group
        improvement += stripe_map[index]
        count += 1
    return matrix, count, stripe_map, stripe_ids, used, improvement, permutation


def _search(tensor, window, escape_attempts):
    """An order of a tensor's columns, with windows of `window` of them."""
    if window == -1 or window >= tensor.shape[1]:
        return search_matrix(_magnitudes.summable(tensor), 4)[2]
    if window not in (8, 12):
        raise ValueError(f"stripe_group_size is 8 or 12 columns, or -1 for all at once, not {window}")
    if window == 8 or tensor.shape[1] <= 512:
        return local_search(tensor, _magnitudes.splits(window), escape_attempts)
    half = tensor.shape[1] // 8 * 4
    left = _search(tensor[:, :half], window, escape_attempts)
    right = _search(tensor[:, half:], window, escape_attempts)
    order = left + [half + column for column in right]
    rest = _search(tensor[:, order], 8, max(escape_attempts, 100) * 10)
    return [order[column] for column in rest]


def Exhaustive_Search(
    matrix: Any,
    stripe_group_size: int = -1,
    escape_attempts: int = 0,
    permutation: Sequence[int] | None = None,
) -> tuple[Any, float, list[int]]:
    """A good order of a matrix's columns.

    Args:
        matrix: [rows, columns], a tensor or a numpy array, a multiple of 4 columns.
        stripe_group_size: how many columns are ordered at a time, 8 or 12, in every way; -1: all, at most 16. Above
            512 columns 12 means each half by itself, then 8 over all.
        escape_attempts: how many times the search starts again with two columns swapped.
        permutation: an order that the matrix has already; what is found is put after it.

    Returns:
        the matrix in that order, seconds, and the order. Raises ValueError.
    """
    tensor, began = _magnitudes.as_tensor(matrix), time.perf_counter()
    found = _search(tensor, stripe_group_size, escape_attempts)
    before = list(range(tensor.shape[1])) if permutation is None else list(permutation)
    return matrix[:, found], time.perf_counter() - began, [before[column] for column in found]
