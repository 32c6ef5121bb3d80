"""What DistributedDataParallel keeps of one process: hooks, buckets, streams, and the backward pass that runs."""

from __future__ import annotations

import collections
import contextlib
import threading
import weakref

import torch

from apex.parallel._buckets import Bucket
from apex.parallel._status import Late


class Live:
    """What belongs to one object in one process, and is neither copied nor pickled.

    Attributes:
        params, handles: parameters that require gradients, and the hooks on them.
        needs_refresh: the buckets are to be found out by the next backward pass.
        buckets, bucket_of: the buckets that all ranks have in common, and the number of each parameter's, by id.
        ordered: whether they follow the order of gradients. If not, they are reduced at the end of a pass.
        groups, streams: process groups, and {(turn, device): stream}, that take turns.
        buffers: reduced buckets, if they are retained.
        late: statuses of the last pass, if an accelerator has them.
        closing: Reductions that ended a pass which raised.

    and of one backward pass:
        current: weak reference to the BackwardPass.
        begun: a parameter got its gradient.
        arrived: id -> parameter in the order of their gradients, while that is being found out.
        next: number of the first bucket that was not started.
        reductions: {number: Reduction}.
        leaves: handles of hooks on outputs that are leaves.
    """

    def __init__(self, communicators=None):
        self.params, self.handles = [], []
        self.needs_refresh = True
        self.buckets, self.bucket_of, self.ordered = [], {}, False
        self.groups = None if communicators is None else list(communicators[0])
        self.given_streams = None if communicators is None else list(communicators[1])
        self.streams = {}
        self.buffers = []
        self.late, self.closing, self.leaves = Late(), [], []
        self.lock = threading.RLock()  # parameters on several devices get their gradients in several threads
        self.current = None
        self.forget_pass()

    def forget_pass(self):
        """What ranks had to send of the pass is sent: what raises from here on is no reason to end it once more."""
        if self.current is not None and (running := self.running()) is not None:
            running.over = True
        self.current = None
        self.begun = False
        self.arrived = {}
        self.next = 0
        self.reductions = {}
        for bucket in self.buckets:
            bucket.empty()

    def forget_leaves(self):
        for handle in self.leaves:
            handle.remove()
        self.leaves = []

    def running(self):
        """The BackwardPass whose end will be told, or None."""
        return None if self.current is None else self.current()

    def set_buckets(self, buckets, ordered):
        self.buckets = [Bucket(list(params)) for params in buckets]
        self.bucket_of = {id(p): number for number, b in enumerate(self.buckets) for p in b.params}
        self.ordered = ordered

    def has_bucket_of_all(self, params):
        """Whether the buckets are those of these parameters."""
        return len(self.bucket_of) == len(params) and all(id(p) in self.bucket_of for p in params)

    def side_stream(self, turn, device):
        """Where results are written: ahead of the backward pass's next kernel, once the one before it ends."""
        if (turn, device) not in self.streams:
            if self.given_streams:
                stream = self.given_streams[turn]
            else:
                stream = torch.get_device_module(device).Stream(device=device, priority=-1)
            self.streams[turn, device] = stream
        return self.streams[turn, device]


class BackwardPass:
    """What the engine calls when a pass is over. If it is dropped without that, the pass raised.

    Attributes:
        accumulates: whether the pass gives leaves their gradients, as torch.autograd.grad does not; None: unknown.
    """

    NEAR = 100  # nodes

    def __init__(self, owner, node=None):
        self._owner = weakref.ref(owner)
        self._node = node
        self.task = torch._C._current_graph_task_id()
        self.over = False
        self.accumulates = None if node is None else _is_executed(_leaf_below(node, self.NEAR))

    def __call__(self):
        owner = self._owner()
        if owner is not None:
            if self.accumulates is None and self._node is not None:
                self.accumulates = _is_executed(_leaf_below(self._node, None))
            owner._epilogue(bool(self.accumulates))
        self.over = True

    def __del__(self):
        owner = self._owner()
        if owner is not None and not self.over:
            owner._abandon(self)


def _leaf_below(node, most):
    """The nearest node that gives a leaf its gradient, among `most` nodes (None: all); None if there is none."""
    waiting, seen = collections.deque([node]), {node}
    while waiting and (most is None or len(seen) <= most):
        node = waiting.popleft()
        if hasattr(node, "variable"):
            return node
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)
    return None


def _is_executed(leaf):
    """Whether the pass that runs gives this leaf its gradient; None: unknown."""
    if leaf is None:
        return None
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # torch's answer for a leaf of torch.autograd.grad
        return False


UNNAMED = contextlib.nullcontext()


@contextlib.contextmanager
def named(name):
    """A range of torch.profiler, and of NVTX."""
    with torch.profiler.record_function(name):
        if torch.cuda.is_available():
            torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            if torch.cuda.is_available():
                torch.cuda.nvtx.range_pop()


def weakly(owner, name):
    """owner.name as a function that does not keep `owner` alive, and does nothing when it is gone."""
    reference = weakref.ref(owner)

    def call(*args):
        owner = reference()
        if owner is not None:
            getattr(owner, name)(*args)

    return call
