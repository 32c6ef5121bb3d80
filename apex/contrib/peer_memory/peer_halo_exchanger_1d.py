"""PeerHaloExchanger1d, which fills the halos of a padded image through peer memory. Public apex's name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from apex._loader.errors import ArgumentError
from apex.contrib.peer_memory.peer_memory import PeerMemoryPool

__all__ = ["PeerHaloExchanger1d"]


class PeerHaloExchanger1d:
    """exchanger(y): the outermost half_halo rows of y get the neighbours' rows, or zeros at the image's edges.

    Args:
        ranks: the group's ranks, from top to bottom, all of them peers of the pool.
        rank_in_group: this rank's place among them.
        peer_pool: the PeerMemoryPool. Nothing of its two parts is taken.
        half_halo: rows on each side.

    Raises:
        ArgumentError: rank_in_group is no place among the ranks; of a call: y is too small, on another device than the
            pool, or not of 4 dimensions.
        PeerMemoryError: of a call: a neighbour did not answer in time. On a GPU an exchange is queued, so the next call
            says it, or peer_pool.check().
    """

    def __init__(
        self, ranks: Sequence[int], rank_in_group: int, peer_pool: PeerMemoryPool, half_halo: int
    ) -> None:
        if not 0 <= rank_in_group < len(ranks):
            raise ArgumentError(
                f"PeerHaloExchanger1d: rank_in_group is {rank_in_group}, of {len(ranks)} ranks"
            )
        self.peer_group_size, self.ranks, self.peer_rank = len(ranks), ranks, rank_in_group
        self.low_neighbor = (rank_in_group - 1) % len(ranks)
        self.high_neighbor = (rank_in_group + 1) % len(ranks)
        self.low_zero, self.high_zero = rank_in_group == 0, rank_in_group == len(ranks) - 1
        self.peer_pool, self.half_halo = peer_pool, half_halo

    def __call__(
        self,
        y: torch.Tensor,
        H_split: bool = True,
        explicit_nhwc: bool = False,
        numSM: int = 0,
        diagnostics: bool = False,
    ) -> None:
        """y: [batch, channels, height, width], or channels last with explicit_nhwc; its first and last half_halo rows
        (columns unless H_split) are written, and those beside them sent. numSM: multiprocessors at most; 0: all.
        diagnostics: prints what is exchanged."""
        axis, half = (1 if explicit_nhwc else 2) + (not H_split), self.half_halo
        if y.dim() != 4 or y.shape[axis] < 2 * half or half < 1:
            raise ArgumentError(
                f"PeerHaloExchanger1d: y must have 4 dimensions, and 2 * half_halo = {2 * half} > 0 rows or more along "
                f"dimension {axis}; it is {list(y.shape)}"
            )
        end = y.shape[axis] - half
        if diagnostics:
            print(
                f"rank {self.peer_rank} of {self.peer_group_size}: {half} of {list(y.shape)} along {axis}, {y.dtype}"
            )
        outputs = y.narrow(axis, half, half), y.narrow(axis, end - half, half)
        inputs = y.narrow(axis, 0, half), y.narrow(axis, end, half)
        low = -1 if self.low_zero else self.ranks[self.low_neighbor]
        high = -1 if self.high_zero else self.ranks[self.high_neighbor]
        with torch.no_grad():
            self.peer_pool.exchange((low, high), outputs, inputs, explicit_nhwc, numSM)
