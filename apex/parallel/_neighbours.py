"""Neighbouring ranks that share statistics: one process group for each size, however many layers use it."""

from __future__ import annotations

import torch.distributed as dist

from apex.parallel.process_groups import create_syncbn_process_group

_groups: dict = {}  # size -> (the world that it divides, this rank's part of it)


def group_of(size):
    """The process group of `size` neighbours of this rank; None for 1.

    The first call for a size is one that every rank must make.

    Raises:
        ValueError: the world cannot be divided so.
        RuntimeError: torch.distributed is not initialized.
    """
    if size == 1:
        return None
    if size < 1:
        raise ValueError(f"a group has at least 1 rank, not {size}")
    world = dist.group.WORLD if dist.is_available() else None
    known = _groups.get(size)
    if known is None or known[0] is not world:
        _groups[size] = known = (world, create_syncbn_process_group(size))
    return known[1]
