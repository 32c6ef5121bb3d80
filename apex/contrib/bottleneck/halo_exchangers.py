"""Exchanges of halos, the rows (or columns) at the edges of images that are split among ranks: public apex's names.

The ranks of a group hold strips of the image from left (top) to right (bottom). Each sends the outermost rows of its
strip, and receives the neighbours' rows that lie next to its own. Halos are tensors of any shape, dtype and strides,
those of all ranks alike.

All have `left_right_halo_exchange(left_output_halo, right_output_halo, left_input_halo=None, right_input_halo=None)`:
sends the first two, and writes to the other two, or returns (left input, right input) where these are None. At the
image's own edges the inputs are zeros. No gradients are recorded; SpatialBottleneck does that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from apex.contrib.peer_memory import PeerMemoryPool
from apex.contrib.peer_memory._push_pull import check_alike
from apex.parallel._waiting import CALLS, waiting

__all__ = [
    "HaloExchanger",
    "HaloExchangerAllGather",
    "HaloExchangerNoComm",
    "HaloExchangerPeer",
    "HaloExchangerSendRecv",
    "HaloPadder",
]


class HaloExchanger:
    """What all exchangers know: the group and this rank's neighbours.

    Args:
        ranks: the group's ranks, from left (top) to right (bottom), in numbers of the default process group.
        rank_in_group: this rank's place among them.

    Attributes:
        left_rank, right_rank: neighbours, -1 for none. left_zero, right_zero: there is none.
        wrap_around_left_rank_in_group, wrap_around_right_rank_in_group: places of the neighbours in a ring.
        stream1, stream2, stream3: CUDA streams for work beside the exchange; None where torch has no GPU.

    Raises:
        ValueError: rank_in_group is no place among the ranks.
    """

    def __init__(self, ranks: Sequence[int], rank_in_group: int) -> None:
        if not 0 <= rank_in_group < len(ranks):
            raise ValueError(
                f"{type(self).__name__}: rank_in_group is {rank_in_group}, of {len(ranks)} ranks: pass the place of "
                "this rank among them"
            )
        self.group_size, self.ranks, self.rank_in_group = len(ranks), ranks, rank_in_group
        self.stream1, self.stream2, self.stream3 = _streams(3)
        self.wrap_around_left_rank_in_group = (rank_in_group - 1) % self.group_size
        self.wrap_around_right_rank_in_group = (rank_in_group + 1) % self.group_size
        self.left_zero, self.right_zero = rank_in_group == 0, rank_in_group == self.group_size - 1
        self.left_rank = -1 if self.left_zero else ranks[rank_in_group - 1]
        self.right_rank = -1 if self.right_zero else ranks[rank_in_group + 1]

    def __deepcopy__(self, memo: dict) -> HaloExchanger:
        """Itself: a copy of a layer speaks to the same ranks."""
        return self

    @torch.no_grad()
    def left_right_halo_exchange(
        self,
        left_output_halo: torch.Tensor,
        right_output_halo: torch.Tensor,
        left_input_halo: torch.Tensor | None = None,
        right_input_halo: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See the module. Raises ValueError and TypeError for halos that do not fit each other."""
        _check(type(self).__name__, left_output_halo, right_output_halo, left_input_halo, right_input_halo)
        if left_input_halo is not None and right_input_halo is not None:
            self._exchange(left_output_halo, right_output_halo, left_input_halo, right_input_halo)
            return None
        left, right = torch.empty_like(right_output_halo), torch.empty_like(left_output_halo)
        self._exchange(left_output_halo, right_output_halo, left, right)
        return left, right

    def _exchange(self, left_output, right_output, left_input, right_input):
        raise NotImplementedError(f"{type(self).__name__} does not exchange: use one of its subclasses")

    def _write(self, left_input, right_input, left, right):
        """What came from the neighbours, or zeros, into the caller's tensors."""
        for into, found, zero in ((left_input, left, self.left_zero), (right_input, right, self.right_zero)):
            into.zero_() if zero else into.copy_(found)


def _streams(count):
    return [torch.cuda.Stream() if torch.cuda.is_available() else None for _ in range(count)]


def _check(name, left_output, right_output, left_input, right_input):
    if (left_input is None) != (right_input is None):
        raise ValueError(f"{name}: left_input_halo and right_input_halo are both given, or both None")
    given = (left_output, right_output, left_input, right_input)
    check_alike(name, [halo for halo in given if halo is not None])


class HaloExchangerNoComm(HaloExchanger):
    """Exchanges nothing: a rank gets its own halos, swapped. To measure what communication costs; results are wrong."""

    def _exchange(self, left_output, right_output, left_input, right_input):
        left_input.copy_(right_output)
        right_input.copy_(left_output)


class HaloExchangerAllGather(HaloExchanger):
    """By one all-gather of everybody's halos.

    comm: the process group of `ranks`, made by torch.distributed.new_group(ranks=ranks); None: the default one.

    Raises:
        ValueError: comm has another number of ranks, or this one has another place in it.
    """

    def __init__(
        self, ranks: Sequence[int], rank_in_group: int, comm: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(ranks, rank_in_group)
        self.comm = comm
        size, here = dist.get_world_size(comm), dist.get_rank(comm)
        if (size, here) != (self.group_size, rank_in_group):
            raise ValueError(
                f"HaloExchangerAllGather: this is rank {here} of the {size} ranks of comm, and {rank_in_group} of "
                f"{self.group_size} in `ranks`: pass comm=torch.distributed.new_group(ranks=ranks)"
            )

    def _exchange(self, left_output, right_output, left_input, right_input):
        mine = torch.stack(
            [left_output, right_output]
        ).contiguous()  # of channels-last halos it is not; NCCL asks
        everyone = [torch.empty_like(mine) for _ in range(self.group_size)]
        with waiting("an exchange of halos", CALLS, type(self).__name__, self.comm) as wait:
            wait.run(dist.all_gather, everyone, mine, group=self.comm)
        left = everyone[self.wrap_around_left_rank_in_group][1]
        self._write(left_input, right_input, left, everyone[self.wrap_around_right_rank_in_group][0])


class HaloExchangerSendRecv(HaloExchanger):
    """By sends and receives of torch.distributed, between neighbours alone; any backend that has them.

    Raises:
        ValueError: this rank is another one than ranks[rank_in_group].
    """

    def __init__(self, ranks: Sequence[int], rank_in_group: int) -> None:
        super().__init__(ranks, rank_in_group)
        if dist.get_rank() != ranks[rank_in_group]:
            raise ValueError(
                f"HaloExchangerSendRecv: this is rank {dist.get_rank()}, and ranks[{rank_in_group}] is "
                f"{ranks[rank_in_group]}"
            )

    def _exchange(self, left_output, right_output, left_input, right_input):
        received = [
            torch.empty_like(t, memory_format=torch.contiguous_format) for t in (left_input, right_input)
        ]
        sent = [t.contiguous() for t in (left_output, right_output)]
        calls = []
        for rank, out, into in zip((self.left_rank, self.right_rank), sent, received, strict=True):
            if rank >= 0:
                calls += [dist.P2POp(dist.isend, out, rank), dist.P2POp(dist.irecv, into, rank)]
        with waiting("an exchange of halos", CALLS, type(self).__name__):
            for work in dist.batch_isend_irecv(calls) if calls else ():
                work.wait()
        self._write(left_input, right_input, *received)


class HaloExchangerPeer(HaloExchanger):
    """Through memory that the ranks of one machine share: one kernel, the quickest way.

    Args:
        ranks, rank_in_group: see HaloExchanger; all ranks are peers of the pool.
        peer_pool: the PeerMemoryPool. Nothing of its two parts is taken.
        explicit_nhwc: halos are [batch, height, width, channels], else [batch, channels, height, width].
        numSM: multiprocessors that work on it at most; 0: all.

    Raises:
        ArgumentError: a neighbour is none of the pool's peers; in a call.
        PeerMemoryError: a neighbour did not answer in the pool's time; in the next call on a GPU, or peer_pool.check().
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank_in_group: int,
        peer_pool: PeerMemoryPool,
        explicit_nhwc: bool,
        numSM: int = 0,
    ) -> None:
        super().__init__(ranks, rank_in_group)
        self.peer_pool, self.explicit_nhwc, self.numSM = peer_pool, explicit_nhwc, numSM

    def _exchange(self, left_output, right_output, left_input, right_input):
        neighbours, outputs = (self.left_rank, self.right_rank), (left_output, right_output)
        self.peer_pool.exchange(
            neighbours, outputs, (left_input, right_input), self.explicit_nhwc, self.numSM
        )


class HaloPadder:
    """padder(y, half_halo, explicit_nhwc, H_split): y with `half_halo` rows of each neighbour around it.

    halo_ex: an exchanger, or a function of (left output, right output, left input, right input). On a GPU the exchange
    and the copy run on streams of their own: call `wait` before the result is read.
    """

    def __init__(self, halo_ex: HaloExchanger | Callable[..., Any]) -> None:
        self.halo_ex = halo_ex
        self.stream1, self.stream2 = _streams(2)

    @torch.no_grad()
    def __call__(self, y: torch.Tensor, half_halo: int, explicit_nhwc: bool, H_split: bool) -> torch.Tensor:
        """y: [batch, channels, height, width], or channels last with explicit_nhwc; split by height or by width.

        Raises ValueError for y with fewer than half_halo rows.
        """
        axis = (1 if explicit_nhwc else 2) + (not H_split)
        size = y.shape[axis] if y.dim() == 4 else 0
        if not 0 < half_halo <= size:
            raise ValueError(
                f"HaloPadder: y must have 4 dimensions and at least half_halo = {half_halo} > 0 rows to share; it is "
                f"{list(y.shape)}, split along dimension {axis}"
            )
        shape = [n + 2 * half_halo * (i == axis) for i, n in enumerate(y.shape)]
        form = torch.contiguous_format if explicit_nhwc else torch.channels_last
        padded = torch.empty(shape, dtype=y.dtype, device=y.device, memory_format=form)
        exchange: Any = getattr(self.halo_ex, "left_right_halo_exchange", self.halo_ex)  # type: ignore[arg-type]
        outputs = y.narrow(axis, 0, half_halo), y.narrow(axis, size - half_halo, half_halo)
        inputs = padded.narrow(axis, 0, half_halo), padded.narrow(axis, size + half_halo, half_halo)
        if not y.is_cuda:
            exchange(*outputs, *inputs)
            padded.narrow(axis, half_halo, size).copy_(y)
            return padded
        for stream in (self.stream1, self.stream2):
            stream.wait_stream(torch.cuda.current_stream())
            for tensor in (y, padded):
                tensor.record_stream(stream)
        with torch.cuda.stream(self.stream1):
            exchange(*outputs, *inputs)
        with torch.cuda.stream(self.stream2):
            padded.narrow(axis, half_halo, size).copy_(y)
        return padded

    def wait(self) -> None:
        """The current stream waits for the last result."""
        for stream in (self.stream1, self.stream2):
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)
