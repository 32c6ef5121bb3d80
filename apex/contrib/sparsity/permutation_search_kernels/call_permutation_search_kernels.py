"""The search for a good order of a weight's channels, by one of several strategies."""

from __future__ import annotations

from typing import Any

import torch

from apex.contrib.sparsity.permutation_search_kernels import _magnitudes
from apex.contrib.sparsity.permutation_search_kernels._local_search import local_search
from apex.contrib.sparsity.permutation_search_kernels.exhaustive_search import Exhaustive_Search

_STRATEGIES = ("exhaustive", "progressive channel swap", "user defined")


def search(matrix: torch.Tensor, options: dict[str, Any]) -> list[int]:
    """An order of the matrix's columns, from the same random numbers whatever was searched before."""
    strategy = options.get("strategy", "exhaustive")
    if strategy not in _STRATEGIES:
        raise ValueError(f"no strategy {strategy!r}: there are {', '.join(_STRATEGIES)}")
    identity = list(range(matrix.shape[1]))
    if strategy == "user defined" or len(identity) <= 4:
        return identity
    _magnitudes.seed()
    if strategy == "exhaustive":
        size, attempts = options.get("stripe_group_size", 8), options.get("escape_attempts", 100)
        return Exhaustive_Search(matrix, stripe_group_size=size, escape_attempts=attempts)[2]
    seconds = options.get("progressive_search_time_limit", 60)
    threshold = options.get("improvement_threshold", 1e-9)
    if len(identity) <= 8:
        return Exhaustive_Search(matrix, 8)[2]
    return local_search(matrix, _magnitudes.splits(8), time_limit=seconds, threshold=threshold)


def accelerated_search_for_good_permutation(
    matrix_group: torch.Tensor, options: dict[str, Any] | None = None, verbosity: int = 0
) -> list[int]:
    """An order of a weight's columns that lets 2:4 pruning keep more of its magnitude.

    Args:
        matrix_group: [rows, channels], a multiple of 4 channels, on any device; the search runs there.
        options: strategy, "exhaustive" (with stripe_group_size, 8, and escape_attempts, 100), "progressive channel
            swap" (with progressive_search_time_limit, 60 s, and improvement_threshold, 1e-9; it stops as soon as
            nothing is gained), or "user defined", which leaves the order as it is.
        verbosity: above 1, what was kept before and after is printed.

    Returns:
        The order, a list: column i of the new weight is column order[i] of the old. Raises ValueError.
    """
    matrix = _magnitudes.as_tensor(matrix_group)
    found = search(matrix, options or {})
    if verbosity > 1:
        before, after = (_magnitudes.kept_magnitude(m) for m in (matrix, matrix[:, found]))
        print(f"[Permutation] of {tuple(matrix.shape)} pruning keeps {after:.6g}, {before:.6g} before")
    return found
