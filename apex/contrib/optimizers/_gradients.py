"""Gradients on their way: copied into buckets, reduced beside the backward pass, summed up in shards."""

from __future__ import annotations

import contextlib

import torch

from apex.contrib.optimizers._flat import flat_like
from apex.contrib.optimizers._ranks import DROP, SYNC, Streams


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
    """

    def __init__(self, state, waits_for, buffer=None):
        self.state, self.waits_for, self.buffer = state, waits_for, buffer
        self.reset()

    def reset(self):
        self.local = self.shard = self._sent = self._incoming = self._work = None
        # Streams: on which memory was allocated, and on which it was written last.
        self._home = self._sent_home = self._incoming_home = self._shard_home = None
        self._written_on = self._shard_written_on = None
        self.seen = set()
        self.written = set()

    @property
    def under_way(self):
        return self._incoming is not None

    @property
    def arrived(self):
        """Whether `finish` will not let the host wait."""
        return self._work is None or self._work.is_completed()

    def open(self, streams):
        """`local`, made if it is not there; the current stream has waited for whoever wrote it."""
        streams.follow(self._written_on)
        if self.local is None:
            # With a single rank the buffer becomes the shard itself, and holds what was summed up already.
            if self.buffer is not None and self.buffer is not self.shard and self.buffer is not self._sent:
                self.local = self.buffer
            else:
                state = self.state
                self.local = torch.zeros(
                    state.bucket_size, dtype=state.grad_sync_dtype, device=state.exp_avg_shard.device
                )
            self._home = streams.current()
        self._written_on = streams.current()
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
        """Starts the reduction of `local`; what comes from here on goes into another one."""
        self._sent, self._sent_home = self.open(streams), self._home
        self.local = self._written_on = None
        self._incoming = self._sent if ranks.count == 1 else self._sent.new_empty(self.state.shard_size)
        self._incoming_home = self._sent_home if ranks.count == 1 else streams.current()
        with streams.beside() if ranks.copies > 1 else contextlib.nullcontext():
            self._work = ranks.reduce_scatter(self._incoming, self._sent, average)
        self.seen.clear()
        self.written.clear()

    def finish(self, streams):
        """Waits for the reduction (on an accelerator: the current stream does) and adds it to `shard`."""
        if self._work is not None:
            self._work.wait()
            streams.join()
        streams.follow(self._shard_written_on)
        self._shard_written_on = streams.current()
        # What is let go here may be used again on the stream that it was allocated on: not before this one is here.
        streams.keep(self._sent, self._sent_home)
        if self.shard is None:
            self.shard, self._shard_home = self._incoming, self._incoming_home
        else:
            self.shard.add_(self._incoming)
        streams.keep(self._incoming, self._incoming_home)
        if self._sent is self.buffer and self.shard is not self.buffer:
            self.buffer.zero_()  # whoever writes to it directly adds from here on
        self._sent = self._incoming = self._work = None

    def use(self, streams):
        """The current stream reads `shard` from here on."""
        streams.follow(self._shard_written_on)
        self._shard_written_on = streams.current()
        streams.keep(self.shard, self._shard_home)


class Gradients:
    """All buckets of gradients.

    Buckets are reduced in one order on every rank, whatever the order in which gradients come there, and each once
    from one zero_grad() to the sync that follows: as far as it goes beside a backward pass, the rest then. What comes
    after a bucket was reduced waits for that sync, and makes another round there. So ranks whose passes reach
    different parameters, or none, send the same messages.

    Args:
        ranks, device: where they go.
        average: mean or sum over ranks.
        in_flight: how many reductions run at once.
        before: called before a reduction starts.
        trained: returns for each parameter, by its key in StateBucket.waits_for, whether it requires a gradient.
        materialize: makes the buckets, if they are not there.
    """

    def __init__(self, ranks, device, average, in_flight, before, trained, materialize):
        self._ranks, self._average, self._before = ranks, average, before
        self._trained, self._materialize = trained, materialize
        self._in_flight = max(in_flight, 1)
        self._streams = Streams(device)
        self._on_host = device.type == "cpu"
        self.buckets = []
        self.order = []
        self._place = []  # of each bucket, in that order
        self._waiting = {}  # parameter -> numbers of the buckets that wait for it
        self._last_trained = None
        self._open = False  # from zero_grad() to a sync: ranks may start reductions beside a backward pass
        self._started = 0  # buckets whose reduction started since then
        self._flying = []

    def append(self, buckets, order):
        """Takes new buckets, before any reduction since the last sync. order: of the numbers of all."""
        self.buckets += buckets
        self.order = order
        self._place = sorted(range(len(order)), key=order.__getitem__)
        self._last_trained = None
        self._waiting = {}
        for number, bucket in enumerate(self.buckets):
            for key in bucket.state.waits_for:
                self._waiting.setdefault(key, []).append(number)

    def reset(self):
        """Drops all gradients. Every rank must call it."""
        try:
            if self._open:
                self._open = False
                self._settle(DROP)
        finally:
            for bucket in self.buckets:
                bucket.reset()
            self._started = 0
        self._open = True

    def settle(self):
        """Before buckets are added: ends what a rank may have started. Every rank must call it."""
        if self._open:
            self._settle(DROP)

    def _settle(self, purpose):
        self._before()
        found = self._ranks.ask(purpose, started=self._started > 0, opened=True, trained=())()
        if found.started:
            self._materialize()
            self._end_round()
        if found.problem:
            raise RuntimeError(found.problem)

    def sync(self):
        """Every bucket has its shard of all gradients so far. Every rank must call it.

        Ranks agree on what is to be done while the reductions are started, which all take part in, whatever comes of
        it: an accelerator has work while its host waits for the other hosts.
        """
        self._before()
        late = any(bucket.local is not None for n, bucket in enumerate(self.buckets) if self._is_over(n))
        opened, self._open = self._open, False
        answer = self._ranks.ask(
            SYNC, late, started=opened, opened=opened, trained=tuple(self._trained().values())
        )
        if opened:
            self._end_round()
        found = answer()
        if found.problem:
            if found.started and not opened:
                self._end_round()
            raise RuntimeError(found.problem)
        if found.late:
            self._end_round()

    def _is_over(self, number):
        """Whether what a bucket holds has missed its reduction."""
        return not self._open or self._place[number] < self._started

    def add(self, fragments_of):
        """Adds the gradients of parameters to their buckets and takes them away from the parameters.

        fragments_of: [(parameter, its fragments)].
        """
        added, copied = ([], []), ([], [])
        for p, fragments in fragments_of:
            elements = None if p.grad is None else _elements(p)
            for fragment in fragments:
                bucket = self.buckets[fragment.bucket_id]
                target = bucket.open(self._streams)[slice(*fragment.bucket_range)]
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
        if not self._started:
            self._await_trained()
        for number in self._waiting.get(key, ()):
            self.buckets[number].seen.add(key)

    def _await_trained(self):
        """Buckets wait for the parameters that require gradients now."""
        trained = self._trained()
        if trained != self._last_trained:
            self._last_trained = trained
            for bucket in self.buckets:
                bucket.waits_for = {key for key in bucket.state.waits_for if trained[key]}

    def start_full(self):
        """Starts reductions of full buckets, in order."""
        while self._open and self._started < len(self.order):
            bucket = self.buckets[self.order[self._started]]
            if not bucket.seen >= bucket.waits_for:
                return
            self._start_next()

    def _start_next(self):
        self._before()
        # On the CPU nobody waits for another rank within a backward pass: that one may be past it, and wait for this.
        while len(self._flying) >= self._in_flight and (not self._on_host or self._flying[0].arrived):
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

    def locals(self):
        """What this rank contributes, of the buckets where it has something, for the current stream to write."""
        return [bucket.open(self._streams) for bucket in self.buckets if bucket.local is not None]

    def shards(self):
        """Each bucket's shard of what was reduced, for the current stream to read."""
        for bucket in self.buckets:
            bucket.use(self._streams)
        return [bucket.shard for bucket in self.buckets]


def _elements(p):
    if p.grad.layout != torch.strided:
        raise TypeError(
            f"apex.contrib.optimizers: the gradient of a parameter of shape {tuple(p.shape)} is sparse and cannot be "
            "reduced: make it without sparse=True"
        )
    return flat_like(p.grad, p)
