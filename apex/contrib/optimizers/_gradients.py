"""Gradients on their way: copied into buckets, reduced beside the backward pass, summed up in shards."""

from __future__ import annotations

import contextlib

import torch

from apex.contrib.optimizers._flat import flat_like
from apex.contrib.optimizers._ranks import Streams


class GradientBucket:
    """Gradients of one StateBucket.

    Args:
        state: the StateBucket.
        waits_for: parameters without which it is not reduced beside a backward pass.
        buffer: its part of a contiguous buffer, or None.

    Attributes:
        local: what this rank contributes, not reduced yet; None: nothing.
        shard: this rank's shard of what was reduced since zero_grad(); None: nothing.
        seen: parameters that got their gradient since the last reduction, in passes that overlap.
        written: parameters whose gradients `local` holds.
        stream: on which `local` was written last.
    """

    def __init__(self, state, waits_for, buffer=None):
        self.state, self.waits_for, self.buffer = state, waits_for, buffer
        self.reset()

    def reset(self):
        self.local = self.shard = self.stream = self._incoming = self._work = None
        self.seen = set()
        self.written = set()

    @property
    def under_way(self):
        return self._incoming is not None

    def open(self):
        """`local`, made if it is not there."""
        if self.local is None:
            # With a single rank the buffer becomes the shard itself, and holds what was summed up already.
            if self.buffer is not None and self.shard is not self.buffer:
                self.local = self.buffer
            else:
                state = self.state
                self.local = torch.zeros(
                    state.bucket_size, dtype=state.grad_sync_dtype, device=state.exp_avg_shard.device
                )
        return self.local

    def holds(self, source, fragment):
        """Whether a gradient is a view of the contiguous buffer."""
        return (
            self.buffer is not None
            and source.data_ptr() == self.buffer[fragment.bucket_range[0] :].data_ptr()
        )

    def adds_to(self, fragment):
        """Whether that part of `local` may hold something already."""
        key = fragment.param_group_id, fragment.param_id
        fresh = key not in self.written and self.local is not self.buffer
        self.written.add(key)
        return not fresh

    def reduce(self, ranks, average, streams):
        """Starts the reduction of `local`."""
        whole = self.open()
        streams.follow(self.stream)
        self._incoming = whole if ranks.count == 1 else whole.new_empty(self.state.shard_size)
        with streams.beside() if ranks.copies > 1 else contextlib.nullcontext():
            self._work = ranks.reduce_scatter(self._incoming, whole, average)
        self.seen.clear()
        self.written.clear()

    def finish(self, streams):
        """Waits for the reduction (on an accelerator: the current stream does) and adds it to `shard`."""
        if self._work is not None:
            self._work.wait()
            streams.join()
        if self.shard is None:
            self.shard = self._incoming
        else:
            self.shard.add_(self._incoming)
        if self.local is self.buffer and self.shard is not self.buffer:
            self.buffer.zero_()  # whoever writes to it directly adds from here on
        self.local = self._incoming = self._work = None


class Gradients:
    """All buckets of gradients.

    Buckets are reduced in one order on every rank, whatever the order in which gradients come there, and all of
    them once before a round is over: ranks whose passes reach different parameters do not wait for each other
    in vain.

    Args:
        ranks, device: where they go.
        average: mean or sum over ranks.
        in_flight: how many reductions run at once.
        before: called before a reduction starts.
    """

    def __init__(self, ranks, device, average, in_flight, before):
        self._ranks, self._average, self._before = ranks, average, before
        self._in_flight = max(in_flight, 1)
        self._streams = Streams(device)
        self.buckets = []
        self.order = []
        self._place = []  # of each bucket, in that order
        self._waiting = {}  # parameter -> numbers of the buckets that wait for it
        self._started = 0  # buckets of this round whose reduction started
        self._overlaps = False  # whether a rank may have started one
        self._rounds = 0
        self._flying = []

    def append(self, buckets, order):
        """Takes new buckets. order: of the numbers of all, in which they are reduced."""
        self.settle()
        self.buckets += buckets
        self.order = order
        self._place = sorted(range(len(order)), key=order.__getitem__)
        self._rounds = 0
        self._waiting = {}
        for number, bucket in enumerate(self.buckets):
            for key in bucket.waits_for:
                self._waiting.setdefault(key, []).append(number)

    def settle(self):
        """Ends a round in which a rank may have started reductions."""
        if self._overlaps or self._started:
            self._end_round()

    def reset(self):
        """Drops all gradients."""
        self.settle()
        for bucket in self.buckets:
            bucket.reset()
        self._rounds = 0

    def sync(self):
        """Every bucket has its shard of all gradients so far. Every rank must call it."""
        self.settle()
        if self._rounds == 0 or any(bucket.local is not None for bucket in self.buckets):
            self._end_round()

    def add(self, fragments_of):
        """Adds the gradients of parameters to their buckets and takes them away from the parameters.

        fragments_of: [(parameter, its fragments)].
        """
        added, copied = ([], []), ([], [])
        for p, fragments in fragments_of:
            elements = None if p.grad is None else _elements(p)
            for fragment in fragments:
                bucket = self.buckets[fragment.bucket_id]
                while bucket.under_way:
                    self._finish_first()
                self._streams.follow(bucket.stream)
                bucket.stream = self._streams.current()
                target = bucket.open()[slice(*fragment.bucket_range)]
                if elements is None:
                    continue
                source = elements[slice(*fragment.param_range)]
                if not bucket.holds(source, fragment):
                    sources, targets = added if bucket.adds_to(fragment) else copied
                    sources.append(source)
                    targets.append(target)
            p.grad = None
        if copied[0]:
            torch._foreach_copy_(copied[1], copied[0])
        if added[0]:
            torch._foreach_add_(added[1], added[0])

    def saw(self, key):
        """A parameter got its gradient in a pass that overlaps; key: as in StateBucket.waits_for."""
        numbers = self._waiting.get(key, ())
        if any(self._place[number] < self._started for number in numbers):
            self._end_round()  # another pass
        self._overlaps = True
        for number in numbers:
            self.buckets[number].seen.add(key)

    def start_full(self):
        """Starts reductions of full buckets, in order."""
        while self._started < len(self.order):
            bucket = self.buckets[self.order[self._started]]
            if not bucket.seen >= bucket.waits_for:
                return
            self._start_next()

    def _start_next(self):
        self._before()
        if len(self._flying) >= self._in_flight:
            self._finish_first()
        bucket = self.buckets[self.order[self._started]]
        self._started += 1
        bucket.reduce(self._ranks, self._average, self._streams)
        self._flying.append(bucket)

    def finish(self):
        """Waits for the reductions that are under way."""
        while self._flying:
            self._finish_first()

    def _finish_first(self):
        self._flying.pop(0).finish(self._streams)

    def _end_round(self):
        while self._started < len(self.order):
            self._start_next()
        self.finish()
        self._started = 0
        self._overlaps = False
        self._rounds += 1


def _elements(p):
    if p.grad.layout != torch.strided:
        raise TypeError(
            f"DistributedFusedAdam: the gradient of a parameter of shape {tuple(p.shape)} is sparse and cannot be "
            "reduced: make it without sparse=True"
        )
    return flat_like(p.grad, p)
