"""Data parallelism over combined gradients: slices of the buffers are averaged over ranks as soon as they are full."""

from __future__ import annotations

import hashlib

import torch

from apex.amp._amp_state import maybe_print
from apex.amp._errors import AmpUsageError

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
            data = tensor.data.contiguous()
            torch.distributed.broadcast(data, 0)
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
    """A run of tensors of one buffer that is averaged in one collective."""

    def __init__(self, part, first, last):
        stop = part.layout.offsets[last - 1] + part.layout.slots[last - 1]
        self.part, self.count = part, last - first
        self.start = part.layout.offsets[first] / part.layout.total  # how far from the network's beginning
        self.flat = part.written[part.layout.offsets[first] : stop]
        self.waiting = self.count


class Reducer:
    """Averages the gradients that autograd writes over all ranks, before they are unscaled.

    Hooks of the parameters count what has arrived. Slices go out in one order on all ranks, as they get full; the
    order is that in which rank 0's got full in the first pass. What is not full at the end of a backward pass, for
    parameters that it did not reach, goes out then, with zeros.
    """

    def __init__(self, replica_count):
        self.replica_count = replica_count
        self._handles, self._slices, self._order = [], [], None
        self._active, self._works = False, []

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
        # Until the first pass shows the order: gradients come from the end.
        self._slices.sort(key=lambda piece: -piece.start)
        self._order = None
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
        self._handles, self._slices = [], []

    def _check_ranks_agree(self, parts):
        digest = hashlib.sha256(
            repr([(str(p.written.dtype), p.layout.shapes) for p in parts]).encode()
        ).digest()
        mine = [
            len(parts),
            sum(len(p.owners) for p in parts),
            sum(p.layout.total for p in parts),
            int.from_bytes(digest[:7], "little"),
        ]
        device = parts[0].grad.device if parts else torch.device("cpu")
        mine = torch.tensor(mine, dtype=torch.int64, device=device)
        found = [torch.empty_like(mine) for _ in range(self.world)]
        torch.distributed.all_gather(found, mine)
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
            torch.distributed.all_reduce(part.written)

    def start(self):
        """A backward pass begins."""
        self._active = True
        self._full, self._works, self._next, self._seen = [], [], 0, set()
        for piece in self._slices:
            piece.waiting = piece.count

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
            piece.waiting -= 1
            if piece.waiting == 0:
                self._full.append(piece)
                self._send_full()

    def _send_full(self):
        if self._order is None:  # the pass that shows it
            return
        while self._next < len(self._order) and self._order[self._next].waiting == 0:
            self._send(self._order[self._next])
            self._next += 1

    @torch.no_grad()
    def _send(self, piece):
        piece.flat.div_(self.world)
        self._works.append(torch.distributed.all_reduce(piece.flat, async_op=True))

    def finish(self):
        """The backward pass is over: what was not sent is, and all is waited for."""
        self._active = False
        if self._order is None:
            self._learn_order()
        for piece in self._order[self._next :]:
            self._send(piece)
        self._wait()

    def abandon(self):
        """The pass raised, on this rank at least. What was sent is waited for."""
        self._active = False
        self._wait()

    def _wait(self):
        for work in self._works:
            work.wait()
        self._works = []

    def _learn_order(self):
        full = [self._slices.index(piece) for piece in self._full]
        order = full + [i for i in range(len(self._slices)) if i not in full]
        if not order:
            self._order = []
            return
        order = torch.tensor(order, dtype=torch.int64, device=self._slices[0].flat.device)
        torch.distributed.broadcast(order, 0)
        self._order = [self._slices[i] for i in order.tolist()]


def _in_words(numbers):
    parts, tensors, elements, _ = numbers.tolist()
    return f"{parts} buffers with {tensors} tensors, {elements} elements"
