"""Streams without a device: a recorder that knows which work is ordered after which, and names what is not.

Every op of torch within `Races` counts as work of the current made-up stream, on tensors of the CPU or of the meta
device. It must come after the last write of what it reads, and after all that was done with what it writes. Memory
that is freed may be used again on the stream that it was allocated on: that one must come after all that was done with
it, or `record_stream` must have been called, as torch's caching allocator wants it.
"""

from __future__ import annotations

import collections
import contextlib

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Stream:
    """What was done on it, and what that came after: for each stream, how much of its work."""

    def __init__(self, name):
        self.name, self.after = name, collections.Counter()

    def __repr__(self):
        return self.name

    def wait_stream(self, other):
        self.after |= other.after


class Device:
    """In the place of torch.cuda."""

    def __init__(self):
        self.streams = [Stream("main")]
        self.current = self.streams[0]

    def Stream(self, device=None, priority=0):
        self.streams.append(Stream(f"side {len(self.streams)}"))
        return self.streams[-1]

    def current_stream(self, device=None):
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class Memory:
    """A storage: the work that was done with parts of it, {(stream, first element, one past the last): how-manieth}."""

    def __init__(self, storage, home):
        self.alive, self.home = StorageWeakRef(storage), home
        self.written, self.used, self.recorded = {}, {}, set()


def _part(tensor):
    spans = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.storage_offset()
    return first, first + (sum(spans) + 1 if tensor.numel() else 0)


class Races(TorchDispatchMode):
    """While it is entered work is recorded; `found` are the races, in words.

    device: a Device.
    """

    def __init__(self, device):
        super().__init__()
        self.device, self.found, self._memory = device, [], {}
        self.network = device.Stream()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        schema = function._schema
        named = [(a, x) for a, x in zip(schema.arguments, args, strict=False)]
        named += [(a, kwargs[a.name]) for a in schema.arguments if kwargs and a.name in kwargs]
        writes = [t for a, x in named if a.alias_info and a.alias_info.is_write for t in _tensors(x)]
        is_view = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
        if not is_view:
            reads = [t for _, x in named for t in _tensors(x)]
            self.work(reads, [*writes, *_tensors(result)], str(function))
        return result

    def work(self, reads, writes, what):
        """Work on the current stream."""
        self.look_for_freed()
        here = self.device.current
        here.after[here] += 1
        for tensor in reads:
            self._access(here, tensor, self._of(tensor).written, f"{what} reads")
        for tensor in writes:
            self._access(here, tensor, self._of(tensor).used, f"{what} writes")
            self._of(tensor).written[(here, *_part(tensor))] = here.after[here]

    def _access(self, here, tensor, others, what):
        first, last = _part(tensor)
        for (stream, start, end), count in others.items():
            if start < last and first < end:
                self._must_follow(here, (stream, count), what)
        self._of(tensor).used[here, first, last] = here.after[here]

    def _of(self, tensor):
        storage = tensor.untyped_storage()
        return self._memory.setdefault(storage._cdata, Memory(storage, self.device.current))

    def _must_follow(self, here, work, what):
        if here.after[work[0]] < work[1]:
            self._say(f"{what} on {here} what {work[0]} may still write or read")

    def _say(self, race):
        if race not in self.found:
            self.found.append(race)

    def record(self, tensor, stream):
        self._of(tensor).recorded.add(stream)

    def look_for_freed(self):
        for key, memory in list(self._memory.items()):
            if memory.alive.expired():
                del self._memory[key]
                for (stream, *_), count in memory.used.items():
                    if all(s.after[stream] < count for s in (memory.home, *memory.recorded)):
                        self._say(f"memory of {memory.home} is free again while {stream} may still use it")

    def collective(self, reads, writes, call=lambda: None):
        """Work of the network, after the current stream; returns what to wait for, which keeps its tensors alive."""
        self.network.wait_stream(self.device.current)
        with self.device.stream(self.network):
            call()
            self.work(reads, writes, "a collective")
        return Work(self.device, self.network, [*reads, *writes])


class Work:
    def __init__(self, device, network, tensors):
        self._device, self._after, self._tensors = device, network.after.copy(), tensors

    def wait(self, timeout=None):
        self._device.current.after |= self._after
        self._tensors = None

    def is_completed(self):
        return False


def _tensors(value):
    return [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
