"""Parameters on their way back: gathered from the shards of all ranks, in buckets."""

from __future__ import annotations

import functools

import torch

from apex.contrib.optimizers import _pending
from apex.contrib.optimizers._flat import copy_lists, flat
from apex.contrib.optimizers._ranks import Streams


class Places:
    """Where the fragments of a StateBucket lie: in the bucket, and in the model's parameters.

    Args:
        state: the StateBucket.
        params: the parameters of its fragments.
    """

    def __init__(self, state, params):
        used = [
            (f, p)
            for f, p in zip(state.fragments, params, strict=True)
            if f.param_range[0] < f.param_range[1]
        ]
        self.params = [p for _, p in used]
        self._ranges = [slice(*f.param_range) for f, _ in used]
        ends = [0, *(end for f, _ in used for end in f.bucket_range), state.bucket_size]
        self._sizes = [last - first for first, last in zip(ends, ends[1:], strict=False)]
        self._pointers = self._views = None

    def in_bucket(self, whole):
        """The fragments' parts of a bucket's elements."""
        return whole.split_with_sizes(self._sizes)[1::2]

    def in_model(self):
        """The fragments' parts of the parameters."""
        pointers = [p.data_ptr() for p in self.params]
        if pointers != self._pointers:
            self._views = [flat(p)[part] for p, part in zip(self.params, self._ranges, strict=True)]
            self._pointers = pointers
        return self._views


class ParameterBucket:
    """The parameters of one StateBucket after a step, until they are where the model reads them.

    Args:
        places: Places.
        state: the StateBucket.
        shard: this rank's shard, of state.param_sync_dtype.
        buffer: the bucket's part of a contiguous parameter buffer, or None.
        unpack: what arrived, of param_sync_dtype -> the values to be written; None: these are.
    """

    def __init__(self, places, state, shard, buffer=None, unpack=None):
        self.params, self._unpack = places.params, unpack
        self._places, self._state, self._shard = places, state, shard
        self._whole, self._work = buffer, None

    def start(self, ranks):
        if self._whole is None and ranks.shards == 1:
            self._whole = self._shard
        elif self._whole is None:
            self._whole = self._shard.new_empty(self._state.bucket_size)
        self._work = ranks.all_gather(self._whole, self._shard)

    def finish(self):
        """Waits (on an accelerator: the current stream does) and writes the parameters."""
        if self._work is not None:
            self._work.wait()
        whole = self._whole if self._unpack is None else self._unpack(self._whole)
        copies = [
            (source, target)
            for source, target, p in zip(
                self._places.in_bucket(whole), self._places.in_model(), self.params, strict=True
            )
            if p.requires_grad and source.data_ptr() != target.data_ptr()
        ]
        copy_lists([source for source, _ in copies], [target for _, target in copies])
        self._whole = self._shard = self._work = None


class Parameters:
    """The buckets of a step; gathered, and finished, in one order on all ranks.

    Both is done on the stream of the step, whoever asks for it: that is where parameters are written without overlap,
    too, and where the memory of what travels was allocated. Who asks waits for it.

    Args:
        ranks: Ranks.
        in_flight: how many are gathered at once.
        device: where parameters are.
    """

    def __init__(self, ranks, in_flight, device):
        self._ranks = ranks
        self._streams = Streams(device)
        self._home = None  # the stream of the step
        self._in_flight = max(in_flight, 1)
        self._buckets = []
        self._last = {}
        self._started = self._finished = 0

    def put(self, buckets):
        """Takes the buckets of a step, in the order in which the model is going to read them."""
        self._buckets = buckets
        self._last = {p: number for number, bucket in enumerate(buckets) for p in bucket.params}
        self._started = self._finished = 0
        self._home = self._streams.current() if buckets else None

    def wait_when_used(self):
        """Whoever uses a parameter from here on waits for it."""
        at_once = 0
        for p, number in self._last.items():
            if _pending.can_wait(p):
                _pending.await_values(p, functools.partial(self.finish, number + 1))
            else:
                at_once = max(at_once, number + 1)
        self._start(self._in_flight)
        self.finish(at_once)

    def start(self, params=None):
        """Starts the buckets up to the last one of these parameters; None: one more."""
        numbers = [self._last.get(p, -1) for p in params or ()]
        self._start(self._started + 1 if params is None else max(numbers, default=-1) + 1)

    def start_all(self):
        """Starts what was not started: a rank that does not use some parameters must not come later."""
        self._start(len(self._buckets))

    def _start(self, count):
        if self._started < min(count, len(self._buckets)):
            with self._streams.on(self._home):
                for bucket in self._buckets[self._started : count]:
                    bucket.start(self._ranks)
                    self._started += 1

    @_pending.untouched
    @torch.no_grad()
    def finish(self, count=None):
        """The parameters of the first `count` buckets, or of all, get their values."""
        count = len(self._buckets) if count is None else min(count, len(self._buckets))
        with self._streams.on(self._home):
            while self._finished < count:
                number = self._finished
                self._start(number + self._in_flight)
                self._buckets[number].finish()
                self._finished += 1
                for p in self._buckets[number].params:
                    if self._last[p] == number:
                        _pending.arrived(p)
        self._streams.follow(self._home)
        if self._finished < len(self._buckets):
            self._start(self._finished + self._in_flight)
        else:
            self.put([])
