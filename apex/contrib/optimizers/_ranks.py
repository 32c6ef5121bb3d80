"""The process groups of a sharded optimizer, and its collectives."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import typing
import zlib

import torch
import torch.distributed as dist

from apex.parallel import _failures
from apex.parallel._waiting import is_of_ranks, waiting
from apex.parallel.process_groups import timeout_of

# Newer torch has these under other names, and warns about the old ones.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)
_all_gather = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)

REDUCTION, PARAMETERS = "a reduction of gradients", "the parameters of a step"
DROP, SYNC = "zero_grad()", "a step, or what measures or clips gradients"


class Agreement(typing.NamedTuple):
    """What all ranks together are about to do with gradients.

    Attributes:
        started: a rank has started reductions.
        late: a rank has gradients that came after their bucket was reduced.
        problem: what keeps the ranks from doing it, in words; None: nothing.
    """

    started: bool
    late: bool
    problem: str | None


def waiting_for_ranks(what, group=None):
    """`waiting` in a process group (None: that of all ranks), in the words of sharded optimizers."""
    return waiting(
        what,
        "a rank ended, or did not call what this one called. Every rank calls step(), zero_grad(), grad_sync(), "
        "grad_norm(), clip_grad_norm(), unscale_grads() and state_dict() alike",
        "apex.contrib.optimizers",
        group,
    )


class Ranks:
    """A grid of ranks: state is sharded over one dimension, and the same along the other.

    Args:
        process_group: all ranks; None: those of torch.distributed.
        distributed: ranks to shard over; None: all.
        redundant: ranks that hold the same shard; None: this one alone.
        full: reductions give every rank all sums, of which it takes its shard.
        reducing, across, gathering: groups of the same ranks as distributed, redundant (full: process_group) and
            distributed, by turns for reductions, those over copies, and parameters; None: that one alone.

    Raises:
        RuntimeError: torch.distributed is not initialized; the sizes do not multiply to that of the whole.
    """

    def __init__(
        self,
        process_group=None,
        distributed=None,
        redundant=None,
        full=False,
        reducing=None,
        across=None,
        gathering=None,
    ):
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "apex.contrib.optimizers: there are no ranks to shard over; call "
                'torch.distributed.init_process_group("nccl") first ("gloo" on CPUs; a single process may be a '
                "group of one)"
            )
        self.everyone = dist.group.WORLD if process_group is None else process_group
        self.distributed = self.everyone if distributed is None else distributed
        self.redundant = redundant
        self.count = dist.get_world_size(self.everyone)
        self.shards = dist.get_world_size(self.distributed)
        self.copies = 1 if redundant is None else dist.get_world_size(redundant)
        self.rank = dist.get_rank(self.distributed)
        if self.count < 1 or self.shards * self.copies != self.count:
            raise RuntimeError(
                f"apex.contrib.optimizers: {self.shards} ranks in distributed_process_group times {self.copies} in "
                f"redundant_process_group are not the {self.count} of process_group; pass groups that make a grid "
                "of it, or leave them out to shard over all ranks"
            )
        self.root = dist.get_global_rank(self.everyone, 0)
        self._full = full
        self._reducing = itertools.cycle(reducing or [self.distributed])
        self._across = itertools.cycle(across or [self.everyone if full else self.redundant])
        self._gathering = itertools.cycle(gathering or [self.distributed])
        self._hosts = _hosts_of(self.everyone)

    def broadcast(self, tensors):
        """Gives each tensor, contiguous, the values of the first rank."""
        if self.count > 1:
            broadcast = functools.partial(dist.broadcast, src=self.root)
            for call in [_Call("the parameters at the start", self.everyone, broadcast, t) for t in tensors]:
                call.wait()

    def check_same(self, what, described):
        """Raises RuntimeError on every rank unless all described themselves by the same text. Every rank calls it."""
        if self._hosts is None:
            return
        checksum = zlib.crc32(described.encode())
        found = torch.tensor([checksum, -checksum], dtype=torch.int64, device="cpu")
        with waiting_for_ranks("the parameters at the start", self._hosts) as wait:
            wait.until(self._hosts.allreduce([found], _largest()))
        if found[0] != -found[1]:
            raise RuntimeError(
                f"apex.contrib.optimizers: {what} are not the same on all ranks: build the same model, in the same "
                "order and with the same options, on every rank of the process group"
            )

    def ask(self, purpose, late=False, *, started, opened, trained):
        """Starts to agree on what all ranks are about to do. Every rank must call it.

        It is one message of eight numbers between the hosts, beside the collectives: no host waits for its device.

        purpose: SYNC or DROP. opened: since the last step there was a zero_grad(). trained: whether each parameter
        requires a gradient. The last two must be the same on all ranks. Returns a function that waits for the others
        and returns the Agreement.
        """
        if self._hosts is None:
            return lambda: Agreement(started, late, None)
        checksum = zlib.crc32(bytes(trained))
        mine = [purpose is DROP, purpose is SYNC, started, late, opened, not opened, checksum, -checksum]
        found = torch.tensor([int(number) for number in mine], dtype=torch.int64, device="cpu")
        with waiting_for_ranks(purpose, self._hosts):
            work = self._hosts.allreduce([found], _largest())

        def answer():
            with waiting_for_ranks(purpose, self._hosts) as wait:
                wait.until(work)
            dropped, synced, started, late, opened, closed, most, least = found.tolist()
            problem = _problem(dropped and synced, opened and closed, most != -least)
            return Agreement(bool(started), bool(late), problem)

        return answer

    def reduce_scatter(self, shard, whole, average):
        """Starts to sum `whole` over all ranks, of which this rank gets `shard`; `whole` may be overwritten.

        average: the mean in place of the sum. Returns what to wait for; None: `whole` is the shard.
        """
        if self.count == 1:
            return None
        operation = dist.ReduceOp.SUM
        if average and _averages(self.distributed, whole.device):
            operation = dist.ReduceOp.AVG
        elif average:
            whole.mul_(1 / self.count)  # before the sum, so that float16 stays in range
        if self._full:
            work = _Call(REDUCTION, next(self._across), dist.all_reduce, whole, op=operation)
            return _OwnPart(work, whole.chunk(self.shards)[self.rank], shard)
        work = _Call(REDUCTION, next(self._reducing), _reduce_scatter, shard, whole, op=operation)
        if self.copies > 1:
            over_copies = functools.partial(_Call, REDUCTION, next(self._across), dist.all_reduce, shard)
            work = _Both(work, functools.partial(over_copies, op=operation))
            if shard.device.type != "cpu":
                work.start_second()
        return work

    def all_gather(self, whole, shard):
        """Starts to fill `whole` with the shards of all ranks. Returns what to wait for, or None."""
        if self.shards == 1:
            if whole.data_ptr() != shard.data_ptr():
                whole.copy_(shard)
            return None
        return _Call(PARAMETERS, next(self._gathering), _all_gather, whole, shard)

    def sum_over_shards(self, tensor):
        """Sums a tensor over the ranks that hold different shards, in place."""
        if self.shards > 1:
            with waiting_for_ranks("a norm of gradients", self.distributed) as wait:
                wait.run(dist.all_reduce, tensor, group=self.distributed)


def _largest():
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    return options


class _Call:
    """A collective that was started, of `collective(*tensors, group=group, **options)`; waiting says for what."""

    def __init__(self, what, group, collective, *tensors, **options):
        self._what, self._group = what, group
        with waiting_for_ranks(what, group):
            self._work = collective(*tensors, group=group, async_op=True, **options)
        self.is_completed = self._work.is_completed

    def wait(self):
        with waiting_for_ranks(self._what, self._group) as wait:
            wait.until(self._work)


class _Both:
    """Two collectives, the second of what the first one gave: what to wait for."""

    def __init__(self, first, second):
        self._first, self._second, self._work = first, second, None

    def start_second(self):
        """Waits for the first one: on the CPU the host does, elsewhere the current stream."""
        if self._work is None:
            self._first.wait()
            self._work = self._second()

    def is_completed(self):
        if self._work is None and self._first.is_completed():
            self.start_second()
        return self._work is not None and self._work.is_completed()

    def wait(self):
        self.start_second()
        self._work.wait()


class _OwnPart:
    """A collective that gives every rank everything: what to wait for, then `shard` is its own part."""

    def __init__(self, work, part, shard):
        self._work, self._part, self._shard = work, part, shard
        self.is_completed = work.is_completed

    def wait(self):
        self._work.wait()
        self._shard.copy_(self._part)


def _problem(some_dropped, some_opened, others_train):
    """What keeps ranks from going on together, in words; None: nothing."""
    drop = (
        "gradients are dropped; call zero_grad() on every rank, then run the pass again or leave the batch out, on "
        "every rank alike"
    )
    if some_dropped:
        return f"apex.contrib.optimizers: some ranks called {DROP}, while others are at {SYNC}: {drop}"
    if some_opened:
        return f"apex.contrib.optimizers: only some ranks called {DROP} since the last step: {drop}"
    if others_train:
        return (
            "apex.contrib.optimizers: parameters require gradients on some ranks only: set requires_grad alike on "
            "every rank, then call zero_grad()"
        )
    return None


_made: collections.Counter[str] = collections.Counter()  # name of a process group -> groups made of its hosts


def _hosts_of(group):
    """A gloo group of the ranks of `group`, for what their hosts say to each other; None: there is nobody to ask.

    Ranks may have sent different numbers of messages in `group` by the time that they ask. torch's new_group would
    want all ranks of the world, or, among these alone, that each is in as many other groups as the next.
    """
    if dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake":
        return None
    if not dist.is_gloo_available():
        raise RuntimeError(
            "apex.contrib.optimizers: ranks tell each other by gloo what they are about to do, and this torch has "
            "none: use a torch built with USE_GLOO=1"
        )
    _made[group.group_name] += 1
    name = f"apex.contrib.optimizers/{group.group_name}/{_made[group.group_name]}"
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    try:
        timeout = timeout_of(group) or dist.distributed_c10d.default_pg_timeout
        return _failures.name(dist.ProcessGroupGloo(store, rank, ranks, timeout), name)
    except RuntimeError as error:
        if not is_of_ranks(error):
            raise
        raise RuntimeError(
            f"apex.contrib.optimizers: the hosts of {ranks} ranks do not reach each other by gloo: every rank of the "
            "process group makes the optimizer; GLOO_SOCKET_IFNAME names the network interface, as eth0"
        ) from error


def _averages(group, device):
    """Whether the backend takes ReduceOp.AVG."""
    return device.type == "cuda" and "nccl" in str(dist.get_backend(group))


class Streams:
    """The streams of a device; none on the CPU, where collectives run in threads of their own.

    Args:
        device: the device.
    """

    def __init__(self, device):
        self._device = device
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._side = None

    def current(self):
        return None if self._module is None else self._module.current_stream(self._device)

    def follow(self, stream):
        """What runs on the current stream from here on waits for what runs on `stream` now."""
        if stream is not None and stream != self.current():
            self.current().wait_stream(stream)

    def keep(self, tensor, home):
        """The current stream has used memory that was allocated on `home`: it is not used again before that is done."""
        here = self.current()
        if here is not None and home is not None and here != home:
            tensor.record_stream(here)

    @contextlib.contextmanager
    def on(self, stream):
        """What is done within runs on this stream; None, or the current one: where it does anyway."""
        if stream is None or stream == self.current():
            yield
            return
        with self._module.stream(stream):
            yield

    @contextlib.contextmanager
    def beside(self):
        """Runs collectives that wait for each other beside the current stream; see `join`."""
        if self._module is None:
            yield
            return
        if self._side is None:
            self._side = self._module.Stream(device=self._device)
        self._side.wait_stream(self.current())
        with self._module.stream(self._side):
            yield

    def join(self):
        """The current stream waits for what ran `beside`."""
        self.follow(self._side)
