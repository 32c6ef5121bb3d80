"""What 2:4 pruning keeps of groups of eight columns, however they are split into fours, in plain PyTorch."""

from __future__ import annotations

import itertools

import torch

# The ways to take four of eight columns, in the order of the results; that of the other four is as far from the end.
FOURS = list(itertools.combinations(range(8), 4))
_ELEMENTS_AT_ONCE = 1 << 16


def check(columns, groups, shown=str):
    """Raises TypeError, ValueError. shown: a dtype in words."""
    if columns.dtype != torch.float32:
        raise TypeError(f"kept_magnitudes takes float32, not {shown(columns.dtype)}")
    if groups.dtype != torch.int32:
        raise TypeError(f"kept_magnitudes: groups are int32, not {shown(groups.dtype)}")
    if columns.dim() != 2 or groups.dim() != 2 or groups.shape[1] != 8:
        raise ValueError(
            "kept_magnitudes: columns [columns, rows] and groups [groups, 8] do not fit: "
            f"{list(columns.shape)}, {list(groups.shape)}"
        )


def _outside(groups, count):
    """Which groups have an index outside [0, count). On the CPU they raise IndexError."""
    outside = (groups < 0) | (groups >= count)
    if groups.device.type == "cpu" and outside.any():
        group, place = outside.nonzero()[0].tolist()
        found = groups[group, place].item()
        raise IndexError(f"kept_magnitudes: groups[{group}] has the index {found}, outside [0, {count})")
    return outside.any(1)


def _of_rows(x):
    """[groups, 70] of magnitudes [groups, 8, rows]."""
    found = []
    pairs = {
        (i, j): (x[:, i] + x[:, j], torch.maximum(x[:, i], x[:, j]))
        for i, j in itertools.combinations(range(8), 2)
    }
    for i, j, k, last in FOURS:
        (first, largest), (second, other) = pairs[i, j], pairs[k, last]
        kept = torch.maximum(torch.maximum(first, second), largest + other)
        found.append(kept.sum(-1))
    return torch.stack(found, 1)


def kept_magnitudes(columns, groups):
    """[groups, 70]: for each four of a group's eight columns, the sum over the rows of their two largest magnitudes.

    Args:
        columns: float32 [columns, rows], the transposed weight; signs do not matter.
        groups: int32 [groups, 8], indices of columns.

    Returns:
        float32. The fours are in the order of itertools.combinations(range(8), 4). A group with an index outside is
        nan; on the CPU it raises IndexError. Raises TypeError and ValueError.
    """
    check(columns, groups)
    count, rows = columns.shape
    outside = _outside(groups, count)
    made = torch.zeros(len(groups), len(FOURS), dtype=torch.float32, device=columns.device)
    if rows and len(groups) and count:
        magnitudes, index = columns.abs(), groups.long().clamp(0, count - 1)
        at_once = max(1, _ELEMENTS_AT_ONCE // rows)
        made = torch.cat([_of_rows(magnitudes[part]) for part in index.split(at_once)])
    return made.masked_fill(outside[:, None], float("nan"))
