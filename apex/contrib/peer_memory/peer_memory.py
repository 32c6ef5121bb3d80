"""PeerMemoryPool: memory of each rank that all ranks of one machine read and write. Public apex's name."""

from __future__ import annotations

import math
import numbers
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from apex._loader.errors import ArgumentError, PeerMemoryError
from apex.contrib.peer_memory import _memory, _push_pull
from apex.parallel._waiting import CALLS, waiting

ALIGNMENT, STRIP, BOX_BYTES = 256, 4096, 1 << 20


def _rounded(size, unit):
    return -(-size // unit) * unit


def _machine():
    """What tells this machine from all others, since it started."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


class PeerMemoryPool:
    """A pool of memory on each rank, in which every peer can write. Every rank of the world must make it together.

    Besides what is asked for, a rank has two inboxes of 1 MiB for each peer: halo exchangers need no other memory.
    Exchanges of one pool are made in the same order on all ranks; the pool keeps them in order on a rank's streams.

    Args:
        static_size, dynamic_size: bytes of the two parts; `reset` empties the dynamic one.
        peer_ranks: ranks of the default group that share memory; None: all on this machine. Alike on all of them.
        device: where the memory is; None: the current GPU, or the CPU where torch has none.
        timeout: seconds that an exchange waits for a neighbour.

    Raises:
        PeerMemoryError: on every rank, if one cannot share: ranks on other machines, GPUs without access to each other,
            containers that do not share IPC, no memory left. It says which exchanger works there.
        ArgumentError: sizes or peer_ranks differ among peers, or peer_ranks are no such ranks; on every rank. A size or
            timeout that is none.
    """

    def __init__(
        self,
        static_size: int,
        dynamic_size: int,
        peer_ranks: Sequence[int] | None = None,
        *,
        device: torch.device | str | None = None,
        timeout: float = _push_pull.TIMEOUT,
    ) -> None:
        self._opened: list[int] = []
        self.raw = 0
        for name, size in (("static_size", static_size), ("dynamic_size", dynamic_size)):
            if not isinstance(size, numbers.Integral) or size < 0:
                raise ArgumentError(f"PeerMemoryPool: {name} must be a number of bytes, not {size!r}")
        if not timeout > 0:
            raise ArgumentError(f"PeerMemoryPool: timeout must be above 0 seconds, not {timeout!r}")
        self.alignment, self.timeout = ALIGNMENT, timeout
        self.static_size, self.dynamic_size = (
            _rounded(static_size, ALIGNMENT),
            _rounded(dynamic_size, ALIGNMENT),
        )
        self.static_offset = self.dynamic_offset = 0
        self.device = torch.device(device) if device is not None else _memory.current_device()
        if self.device.type == "cuda" and self.device.index is None:
            self.device = _memory.current_device()
        self.peer_ranks = self._peers(peer_ranks)
        self._boxes_begin = _rounded(self.static_size + self.dynamic_size, STRIP)
        self._share(self._boxes_begin + 2 * len(self.peer_ranks) * BOX_BYTES)
        self._faults = _push_pull.Faults(self.device)
        self._stream: torch.cuda.Stream | None = None
        self._boxes_of: dict[tuple[int, int], tuple[int, int]] = {}  # (neighbour, side) -> what _boxes says

    def _peers(self, wanted):
        """The peers' ranks. Raises on every rank if these do not fit."""
        rank = dist.get_rank()
        mine = dict(
            machine=_machine(), wanted=list(wanted) if wanted is not None else None, kind=self.device.type,
            sizes=(self.static_size, self.dynamic_size),
        )  # fmt: skip
        everyone = [None] * dist.get_world_size()
        with waiting("making this pool", CALLS, "PeerMemoryPool"):
            dist.all_gather_object(everyone, mine)
        chosen = []
        for r, one in enumerate(everyone):
            near = [i for i, other in enumerate(everyone) if other["machine"] == one["machine"]]
            chosen.append(near if one["wanted"] is None else one["wanted"])
            others = set(chosen[r])
            if r not in others or len(others) < len(chosen[r]) or not others <= set(range(len(everyone))):
                raise ArgumentError(
                    f"PeerMemoryPool: peer_ranks of rank {r} are {chosen[r]}: ranks of the world, itself too, each once"
                )
            far = [i for i in chosen[r] if i not in near]
            if far:
                raise PeerMemoryError(
                    f"PeerMemoryPool: ranks {r} and {far[0]} are on different machines, and only one machine's "
                    "ranks share memory",
                    remedy=_memory.INSTEAD,
                )
        for r, ranks in enumerate(chosen):
            for i in ranks:
                if chosen[i] != ranks or any(everyone[i][k] != everyone[r][k] for k in ("sizes", "kind")):
                    raise ArgumentError(
                        f"PeerMemoryPool: ranks {r} and {i} are peers, and must give the same peer_ranks, sizes and "
                        f"kind of device: {ranks}, {everyone[r]['sizes']}, {everyone[r]['kind']}; {chosen[i]}, "
                        f"{everyone[i]['sizes']}, {everyone[i]['kind']}"
                    )
        return chosen[rank]

    def _share(self, size):
        """Makes this rank's memory and opens the peers'. All ranks raise if one cannot."""
        handles = self._together(lambda: _memory.handle(self._allocate(size)))
        rank = dist.get_rank()

        def open_all():
            self.peer_raw = []
            for r in self.peer_ranks:
                raw = self.raw if r == rank else _memory.opened(self.device, size, handles[r])
                self.peer_raw.append(raw)
                if r != rank:
                    self._opened.append(raw)

        self._together(open_all)

    def _allocate(self, size):
        self.raw = _memory.allocate(self.device, size)
        return self.raw

    def _together(self, step):
        """What `step` gave, on each rank. Raises on every rank what it raised on the first where it failed."""
        try:
            mine = (step(), "")
        except Exception as error:  # of any kind: the others wait for this rank's word
            mine = (None, getattr(error, "what", "") or f"{type(error).__name__}: {error}")
        everyone = [None] * dist.get_world_size()
        with waiting("making this pool", CALLS, "PeerMemoryPool"):
            dist.all_gather_object(everyone, mine)
        for r, (_, why) in enumerate(everyone):
            if why:
                self.close()
                raise PeerMemoryError(f"PeerMemoryPool: rank {r}: {why}", remedy=_memory.INSTEAD)
        return [found for found, _ in everyone]

    def close(self) -> None:
        """Gives the memory back. Tensors of it must not be used any more, and no peer may be exchanging."""
        while self._opened:
            _memory.free(self._opened.pop())
        if self.raw:
            raw, self.raw = self.raw, 0
            _memory.free(raw)

    def _require_open(self):
        if not self.raw:
            raise PeerMemoryError(
                "PeerMemoryPool: it is closed, its memory given back",
                remedy="make another one, on every rank",
            )

    def __del__(self) -> None:
        if not sys.is_finalizing():  # else the driver is gone, or takes all back by itself
            self.close()

    def reset(self) -> None:
        """Makes the dynamic part empty: its tensors' memory is handed out again."""
        self.dynamic_offset = 0

    def allocate_peer_tensors(
        self, shape: Sequence[int], dtype: torch.dtype, channels_last: bool, dynamic: bool
    ) -> list[torch.Tensor]:
        """A tensor on each peer, in the order of peer_ranks, of any dtype; contiguous, or in torch.channels_last.

        Peers that make the same calls in the same order get the same tensors. Raises PeerMemoryError when the part is
        used up or the pool is closed, and ArgumentError for what is no shape; the part stays as it was then.
        """
        self._require_open()
        shape = list(shape)
        if not all(isinstance(n, numbers.Integral) and n >= 0 for n in shape):
            raise ArgumentError(f"allocate_peer_tensors: the shape {shape} must consist of sizes from 0 on")
        size = math.prod(shape) * dtype.itemsize
        used, part = (
            (self.dynamic_offset, self.dynamic_size) if dynamic else (self.static_offset, self.static_size)
        )
        begin = _rounded(used, ALIGNMENT)
        if begin + size > part:
            word, more = ("Dynamic", "; reset() empties it") if dynamic else ("Static", "")
            raise PeerMemoryError(
                f"{word} peer memory pool exhausted", wanted=f"{size} bytes", found=f"{part - begin} of {part} left",
                remedy=f"PeerMemoryPool with a larger {word.lower()}_size{more}",
            )  # fmt: skip
        first = begin + (self.static_size if dynamic else 0)
        tensors = [_memory.view(raw + first, shape, dtype, channels_last) for raw in self.peer_raw]
        if dynamic:
            self.dynamic_offset = begin + size
        else:
            self.static_offset = begin + size
        return tensors

    def check(self) -> None:
        """Raises PeerMemoryError if a neighbour did not answer in an exchange that has ended."""
        self._faults.check("PeerMemoryPool", self.timeout)

    def exchange(
        self,
        neighbours: tuple[int, int],
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        explicit_nhwc: bool,
        numSM: int,
    ) -> None:
        """Sends the outputs to the (left, right) neighbours, ranks or -1 for none, and receives the inputs from them.

        Raises as _push_pull.push_pull, and PeerMemoryError where the pool is closed.
        """
        self._require_open()
        sides = []
        for i, rank in enumerate(neighbours):
            boxes = self._boxes_of.get((rank, i))
            if boxes is None:
                boxes = self._boxes_of[rank, i] = self._boxes(rank, i)
            inbox, outbox = boxes
            sides.append(_push_pull.Side(outputs[i], inputs[i], inbox, outbox, rank < 0))
        if self.device.type == "cuda":
            self._keep_order()
        device, home = outputs[0].device, self.device
        if device != home:
            raise ArgumentError(f"PeerMemoryPool: halos are on {device}, and the pool is on {home}")
        _push_pull.push_pull(
            "PeerMemoryPool", explicit_nhwc, numSM, sides, BOX_BYTES, self._faults, self.timeout
        )

    def _boxes(self, neighbour, side):
        """(this rank's inbox, the neighbour's) for what goes over `side` of this rank: 0 left, 1 right."""
        if neighbour < 0:
            return 0, 0
        if neighbour not in self.peer_ranks:
            raise ArgumentError(f"PeerMemoryPool: rank {neighbour} is none of its peers, {self.peer_ranks}")
        theirs = self.peer_raw[self.peer_ranks.index(neighbour)] + self._boxes_begin
        place, mine = self.peer_ranks.index(neighbour), self.peer_ranks.index(dist.get_rank())
        inbox = self.raw + self._boxes_begin + (2 * place + side) * BOX_BYTES
        return inbox, theirs + (2 * mine + 1 - side) * BOX_BYTES

    def _keep_order(self):
        """The current stream waits for the last exchange, whose inboxes it uses; a graph waits for nothing outside."""
        raw = torch._C._cuda_getCurrentRawStream(self.device.index)  # ten times as quick as to make a Stream
        if self._stream is not None and self._stream.cuda_stream == raw:
            return
        if torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self.device)
        if self._stream is not None:
            stream.wait_stream(self._stream)
        self._stream = stream
