"""Channel swaps: the search that orders two stripes at a time by exchanging one column of each."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from apex.contrib.sparsity.permutation_search_kernels import _magnitudes
from apex.contrib.sparsity.permutation_search_kernels._local_search import local_search
from apex.contrib.sparsity.permutation_search_kernels.permutation_utilities import try_swap

__all__ = [
    "Channel_Swap",
    "build_stripe_pairs",
    "build_swap_map",
    "columns_to_stripes_and_swap_idx",
    "compute_swap_map",
    "stripes_and_swap_idx_to_columns",
    "try_swap",
    "use_swap_map",
]


def stripes_and_swap_idx_to_columns(stripe0: int, stripe1: int, idx: int) -> tuple[int, int] | None:
    """The two columns of swap `idx` (0 to 15) of two stripes."""
    return (stripe0 * 4 + idx // 4, stripe1 * 4 + idx % 4) if 0 <= idx < 16 else None


def columns_to_stripes_and_swap_idx(col0: int, col1: int) -> tuple[int, int, int]:
    """The stripes of two columns, and which swap of the stripes exchanges them."""
    return col0 // 4, col1 // 4, col0 % 4 * 4 + col1 % 4


def build_stripe_pairs(matrix: Any, used_stripes: Iterable[int]) -> list[list[int]]:
    """The pairs of stripes of which one is among `used_stripes`."""
    used, count = set(used_stripes), matrix.shape[1] // 4
    return [[i, j] for i in range(count) for j in range(i + 1, count) if i in used or j in used]


def compute_swap_map(matrix: Any, used_stripes: Iterable[int]) -> dict[tuple[int, int], float]:
    """{(column, column): how much more is kept when they are swapped} of all pairs of stripes with a used one."""
    pairs, columns = (
        build_stripe_pairs(matrix, used_stripes),
        _magnitudes.columns_of(_magnitudes.as_tensor(matrix)),
    )
    four = torch.arange(4, dtype=torch.int32, device="cpu")
    groups = (4 * torch.tensor(pairs, dtype=torch.int32, device="cpu").view(-1, 2)[..., None] + four).flatten(
        1
    )
    gains = _magnitudes.gains_of_swaps(columns, groups.to(columns.device))
    return {
        (4 * one + index // 4, 4 * two + index % 4): gain
        for (one, two), row in zip(pairs, gains.tolist(), strict=True)
        for index, gain in enumerate(row)
    }


def build_swap_map(
    matrix: Any,
    swap_map: list[float],
    swap_ids: list[tuple[int, int]],
    used_stripes: Iterable[int],
    verbosity: int = 0,
) -> tuple[list[float], list[tuple[int, int]]]:
    """The gain and the columns of every swap. Lists that are not empty are those of a call before: swaps without a
    stripe of `used_stripes` stay as they are."""
    fresh = not swap_ids
    gains = compute_swap_map(matrix, range(matrix.shape[1] // 4) if fresh else used_stripes)
    if fresh:
        swap_ids += sorted(gains)
        swap_map += [0.0] * len(swap_ids)
    for index, pair in enumerate(swap_ids):
        swap_map[index] = gains.get(pair, swap_map[index])
    if verbosity > 15:
        print(f"\tupdated {len(gains)} map entries")
    return swap_map, swap_ids


def use_swap_map(
    matrix: Any,
    swap_map: list[float],
    swap_ids: list[tuple[int, int]],
    threshold: float,
    used_escape_attempts: int,
    escape_attempts: int,
    permutation: list[int],
    verbosity: int = 0,
) -> tuple:
    """Makes the swaps of the largest gains that share no stripe, down to `threshold` times the largest (within
    [0.0001, 1]); where there is none and attempts are left, a random one.

    Returns:
        the matrix, changed in place; how many swaps; both lists; the stripes that changed; the gain of all; the
        attempts used; the order of all columns.
    """
    used: list[int] = []
    swaps, improvement = 0, 0.0
    by_gain = sorted(range(len(swap_map)), key=swap_map.__getitem__, reverse=True)
    least = min(max(swap_map[by_gain[0]] * threshold, 0.0001), 1.0) if by_gain else 0.0
    chosen = [index for index in by_gain if swap_map[index] >= least]
    if not chosen and by_gain and used_escape_attempts < escape_attempts:
        chosen, used_escape_attempts = [_magnitudes.generator.choice(by_gain)], used_escape_attempts + 1
    for index in chosen:
        one, two = swap_ids[index]
        if one // 4 in used or two // 4 in used:
            continue
        used += [one // 4, two // 4]
        matrix[:, [one, two]] = matrix[:, [two, one]]
        permutation[one], permutation[two] = permutation[two], permutation[one]
        improvement += swap_map[index]
        swaps += 1
    return matrix, swaps, swap_map, swap_ids, used, improvement, used_escape_attempts, permutation


def Channel_Swap(
    matrix: Any, escape_attempts: int = 0, verbosity: int = 0, permutation: Sequence[int] | None = None
) -> tuple[Any, float, list[int]]:
    """(the matrix in a good order, seconds, the order after `permutation`): swaps of two columns, the best first."""
    tensor, began = _magnitudes.as_tensor(matrix), time.perf_counter()
    found = list(range(tensor.shape[1]))
    if len(found) > 4:
        found = local_search(tensor, _magnitudes.swap_orders(), escape_attempts)
    seconds = time.perf_counter() - began
    if verbosity > 10:
        print(f"\tkept {_magnitudes.kept_magnitude(tensor[:, found]):.2f} after {seconds:.2f} s")
    before = list(range(len(found))) if permutation is None else list(permutation)
    return matrix[:, found], seconds, [before[column] for column in found]
