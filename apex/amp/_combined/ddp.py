"""Data parallelism over combined gradients: slices of the buffers are averaged over ranks as soon as they are full."""

from __future__ import annotations

import hashlib

import torch

from apex._plain import plain
from apex.amp._amp_state import maybe_print
from apex.amp._errors import AmpUsageError
from apex.parallel._status import Late
from apex.parallel._waiting import CALLS, waiting

MEBI = 1 << 20
LEAST = MEBI  # elements of a slice
MOST = {torch.float32: 24 * MEBI}
MOST_HALF = 48 * MEBI


def check_distributed():
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        raise AmpUsageError(
            "combine_ddp=True averages gradients over ranks, but torch.distributed is not initialized",
            remedy='torch.distributed.init_process_group("nccl")  # "gloo" on CPUs, before amp.initialize',
        )


@torch.no_grad()
def broadcast_models(models):
    """Every rank gets rank 0's parameters and buffers."""
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            data = plain(tensor.data).contiguous()
            with waiting("the models at the start", CALLS) as wait:
                wait.run(torch.distributed.broadcast, data, 0)
            tensor.data.copy_(data)


def plan_slices(slots, dtype, replica_count):
    """[(first, last)]: runs of tensors whose slots make one slice each.

    A slice is closed once it is longer than the buffer's length by `replica_count`, but that no less than 2^20
    elements and no more than 24 * 2^20 of float32 or 48 * 2^20 of half precision; a tensor that is longer by itself
    is a slice of its own.
    """
    most = MOST.get(dtype, MOST_HALF)
    threshold = min(max(sum(slots) // replica_count, LEAST), most)
    slices, first, size = [], 0, 0
    for i, slot in enumerate(slots):
        if slot > threshold and i > first:
            slices.append((first, i))
            first, size = i, 0
        size += slot
        if size > threshold:
            slices.append((first, i + 1))
            first, size = i + 1, 0
    if first < len(slots):
        slices.append((first, len(slots)))
    return slices


class Slice:
    """A run of tensors of one buffer that is averaged in one collective.

    Attributes:
        streams: those on which its gradients are written in this pass; empty on the CPU.
    """

    def __init__(self, part, first, last):
        stop = part.layout.offsets[last - 1] + part.layout.slots[last - 1]
        self.part, self.count = part, last - first
        self.start = part.layout.offsets[first] / part.layout.total  # how far from the network's beginning
        self.flat = part.written[part.layout.offsets[first] : stop]
        self.status = self.flat[-1:]  # lies behind the tensors, is 0, and is not 0 where a rank's pass raised
        self.empty()

    def empty(self):
        self.waiting, self.streams = self.count, set()

    def arrived(self):
        """One more gradient is there, or will be on the current stream."""
        self.waiting -= 1
        if self.flat.device.type != "cpu":
            self.streams.add(torch.get_device_module(self.flat.device).current_stream(self.flat.device))

    @torch.no_grad()
    def send(self, world):
        """Starts the mean, after all that was written on whichever stream."""
        if self.streams:
            here = torch.get_device_module(self.flat.device).current_stream(self.flat.device)
            for stream in self.streams - {here}:
                here.wait_stream(stream)
        self.flat.div_(world)
        with waiting("combined gradients"):
            return torch.distributed.all_reduce(self.flat, async_op=True)


class Reducer:
    """Averages the gradients that autograd writes over all ranks, before they are unscaled.

    Hooks of the parameters count what has arrived. Slices go out in one order on all ranks, as they get full; the
    order is that in which rank 0's got full in the first pass. What is not full at the end of a backward pass, for
    parameters that it did not reach, goes out then, with zeros. The last slice always goes out then: a rank whose pass
    raised sends what is left, and says so in an element behind the last tensor, and all ranks raise. On an accelerator
    the others read that at the end of the next pass.

    Args:
        replica_count: about how many slices a buffer makes.
        device: where parameters are.
    """

    def __init__(self, replica_count, device):
        self.replica_count, self.device = replica_count, device
        self._handles, self._slices, self._order = [], [], None
        self._active, self._works = False, []
        self._late = Late(1)

    # ---- making ----------------------------------------------------------------------------------------------

    def attach(self, parts):
        self.detach()
        self.world = torch.distributed.get_world_size()
        self._check_ranks_agree(parts)
        for part in parts:
            views = part.grads if part.models is None else part.model_grads
            for first, last in plan_slices(part.layout.slots, part.written.dtype, self.replica_count):
                piece = Slice(part, first, last)
                self._slices.append(piece)
                for i in range(first, last):
                    self._watch(part, part.sources[i], views, i, piece)
        # Until a pass has shown the order: gradients come from the end.
        self._slices.sort(key=lambda piece: -piece.start)
        self._order, self._ordered = list(self._slices), False
        lengths = [piece.flat.numel() for piece in self._slices]
        maybe_print(
            f"apex.amp: combined gradients are averaged in {len(lengths)} slices of {lengths} elements", True
        )

    def _watch(self, part, source, views, i, piece):
        def arrived(param):
            if self._active:
                if param.grad is not views[i]:  # replaced in this pass, as with create_graph=True
                    with torch.no_grad():
                        views[i].copy_(param.grad)
                    param.grad = views[i]
                self._arrived(piece, id(param))

        self._handles.append(source.register_post_accumulate_grad_hook(arrived))

    def detach(self):
        for handle in self._handles:
            handle.remove()
        self._handles, self._slices, self._order = [], [], None

    def _check_ranks_agree(self, parts, raised=False):
        digest = hashlib.sha256(
            repr([(str(p.written.dtype), p.layout.shapes) for p in parts]).encode()
        ).digest()
        mine = [
            len(parts),
            sum(len(p.owners) for p in parts),
            sum(p.layout.total for p in parts),
            int.from_bytes(digest[:7], "little"),
            int(raised),
        ]
        mine = torch.tensor(mine, dtype=torch.int64, device=self.device)
        found = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
        with waiting("the first backward pass of combined gradients") as wait:
            wait.run(torch.distributed.all_gather, found, mine)
        if raised:
            return  # with the exception of this rank's own
        if any(other[-1] for other in found):
            raise _another_raised()
        for rank, other in enumerate(found):
            if not torch.equal(other, mine):
                raise AmpUsageError(
                    "combine_ddp: ranks have inconsistent parameters with gradients",
                    wanted=f"rank {torch.distributed.get_rank()}: {_in_words(mine)}",
                    found=f"rank {rank}: {_in_words(other)}",
                    remedy="build the same model on every rank, and let its first backward pass reach the same "
                    "parameters on each",
                )

    def refuse_late_gradient(self):
        if not self._active:
            self.start()
        self.abandon()
        raise AmpUsageError(
            "combine_ddp: a parameter got its first gradient after gradients were combined; ranks cannot know of each "
            "other's",
            remedy="let the first backward pass reach every parameter that trains, on every rank",
        )

    # ---- averaging -------------------------------------------------------------------------------------------

    def reduce_whole(self):
        """After the first backward pass: nothing counted it."""
        for part in {id(piece.part): piece.part for piece in self._slices}.values():
            part.written.div_(self.world)
            with waiting("combined gradients") as wait:
                wait.run(torch.distributed.all_reduce, part.written)

    def start(self):
        """A backward pass begins."""
        self._active = True
        self._full, self._works, self._next, self._seen = [], [], 0, set()
        for piece in self._slices:
            piece.empty()

    def _arrived(self, piece, param):
        if param in self._seen and piece.waiting == 0:
            raise AmpUsageError(
                "combine_ddp: a parameter got a second gradient inside one amp.scale_loss, when its first was being "
                "averaged over ranks",
                remedy="one scaled_loss.backward() a with statement, of the sum of the losses; checkpoint(..., "
                "use_reentrant=False)",
            )
        if param not in self._seen:
            self._seen.add(param)
            piece.arrived()
            if piece.waiting == 0:
                self._full.append(piece)
                self._send_full()

    def _send_full(self):
        if not self._ordered:  # the pass that shows it
            return
        while self._next < len(self._order) - 1 and self._order[self._next].waiting == 0:
            self._send_next()

    def _send_next(self):
        self._works.append(self._order[self._next].send(self.world))
        self._next += 1

    def finish(self):
        """The backward pass is over: what was not sent is, and all is waited for.

        Raises AmpUsageError, on every rank, if the pass of another one raised.
        """
        self._active = False
        while self._next < len(self._order):
            self._send_next()
        self._wait()
        if not self._order:
            return
        before, status = self._late.read(), self._order[-1].status
        on_host = status.device.type == "cpu"
        if (on_host or not self._ordered) and status.item() != 0:
            status.zero_()
            raise _another_raised()
        if not on_host and self._ordered:
            self._late.put(status)
            status.zero_()
        if not self._ordered:
            self._learn_order()
        if before[0]:
            raise _another_raised()

    @torch.no_grad()
    def abandon(self):
        """The pass raised, on this rank at least: the others get what they wait for, and raise, too."""
        if self._order is None:
            self._check_ranks_agree([], raised=True)
        elif self._active and self._order:
            last = self._order[-1].status
            while self._next < len(self._order):
                if self._next == len(self._order) - 1:
                    last.fill_(1)
                self._send_next()
            self._wait()
            last.zero_()
        self._active = False

    def _wait(self):
        with waiting("combined gradients") as wait:
            for work in self._works:
                wait.until(work)
        self._works = []

    def _learn_order(self):
        full = [self._slices.index(piece) for piece in self._full]
        order = full + [i for i in range(len(self._slices)) if i not in full]
        order = torch.tensor(order, dtype=torch.int64, device=self.device)
        with waiting("the order of combined gradients") as wait:
            wait.run(torch.distributed.broadcast, order, 0)
        self._order, self._ordered = [self._slices[i] for i in order.tolist()], True


def _another_raised():
    return AmpUsageError(
        "combine_ddp: the backward pass of a rank raised, so there is no mean of gradients",
        remedy="on every rank alike: optimizer.zero_grad(), then the pass again, or leave the batch out",
    )


def _in_words(numbers):
    parts, tensors, elements, *_ = numbers.tolist()
    return f"{parts} buffers with {tensors} tensors, {elements} elements"
