"""DistributedDataParallel and Reducer: the mean of gradients over the ranks of torch.distributed."""

from __future__ import annotations

import contextlib
import numbers
import operator
import threading
import warnings
import weakref
import zlib

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from apex.parallel._buckets import Bucket, by_type, plan_buckets
from apex.parallel._flat import (  # noqa: F401  public apex has them here
    apply_flat_dist_call,
    extract_tensors,
    flat_dist_call,
    flatten,
    import_flatten_impl,
    split_by_type,
    split_half_float_double_bfloat16,
    unflatten,
)
from apex.parallel._reduction import HALVES, Averaging, Reduction


class Reducer:
    """Reduces when told to: `reduce()` replaces gradients by their mean over all ranks.

    Args:
        module_or_grads_list: a module, whose parameters are broadcast from rank 0 here; or tensors, in nested
            iterables, which are the caller's to keep in step.
    """

    def __init__(self, module_or_grads_list):
        _check_initialized("Reducer")
        self.module = None
        self.grads = []
        if isinstance(module_or_grads_list, torch.nn.Module):
            self.module = module_or_grads_list
            _broadcast_parameters(self.module)
        else:
            extract_tensors(module_or_grads_list, self.grads)

    def reduce(self):
        """The mean over ranks, of the module's gradients or of the tensors. Every rank must call it.

        A parameter that has a gradient on some ranks only counts as 0 on the others.
        """
        if self.module is None:
            flat_dist_call(self.grads, dist.all_reduce)
            return
        params = [p for p in self.module.parameters() if p.requires_grad]
        name_of = _namer(self.module)
        for reduction in [Reduction(bucket, Averaging(), name_of=name_of) for bucket in by_type(params)]:
            reduction.finish()


class DistributedDataParallel(torch.nn.Module):
    """A module whose gradients become their mean over all ranks while backward() runs.

        torch.distributed.init_process_group(...)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")     # if amp is used, first
        model = apex.parallel.DistributedDataParallel(model)

    Parameters (not buffers) are broadcast from rank 0 when it is made. The first backward pass finds out in
    which order gradients come; rank 0's order decides which ones travel together, and from the second pass on
    each bucket is reduced as soon as it is full, beside the rest of the backward pass: on an accelerator on a
    stream of its own, on the CPU by the process group's threads. When backward() returns, gradients are
    reduced (on an accelerator: for what is queued on the current stream from then on).

    A parameter that got no gradient on this rank, but did on another, counts as 0 here and gets the mean; one
    that no rank used keeps None. If a parameter lacks its gradient here the host waits once for the device;
    `requires_grad_(False)` on parameters that are never used saves that, and their share of the messages.

    Every backward pass reduces what the gradients hold then, what was accumulated before included. Accumulate
    between `disable_allreduce()` and `enable_allreduce()`, to communicate in the last pass only.

    Args:
        module: on the device that it trains on.
        message_size: smallest number of elements in a bucket; there is at least one bucket for each dtype.
        delay_allreduce: reduce everything at the end of the backward pass, in one message for each dtype.
        shared_param: must be None. Parameters may be shared.
        allreduce_trigger_params: parameters; a bucket is full when one of these gets its gradient, whatever
            message_size says.
        retain_allreduce_buffers: `allreduce_buffers` keeps the reduced buckets until the next backward pass, and
            gradients are views of them.
        allreduce_always_fp32: sum float16 and bfloat16 gradients in float32.
        num_allreduce_streams: more than 1: that many process groups (and streams) take turns.
        allreduce_communicators: (process groups, streams) to use for that, num_allreduce_streams of each.
        gradient_average: False: gradients become sums over ranks, still divided by gradient_predivide_factor.
        gradient_predivide_factor: gradients are divided by it before the sum, and by world size / factor after.
        gradient_average_split_factor: gradient_predivide_factor, by its name of 2018.
        prof: name what happens for torch.profiler (and as NVTX ranges).

    Attributes:
        needs_refresh: the next backward pass is to find the buckets anew. Set where parameters come to require
            gradients, or no longer do.

    Raises:
        RuntimeError: torch.distributed is not initialized; ranks hold different parameters; the backend cannot
            reach the parameters; backward() reaches a parameter again whose bucket is under way.
        ValueError: options that do not go together.
        TypeError: an option of another type; a sparse gradient.
    """

    def __init__(
        self,
        module,
        message_size=10000000,
        delay_allreduce=False,
        shared_param=None,
        allreduce_trigger_params=None,
        retain_allreduce_buffers=False,
        allreduce_always_fp32=False,
        num_allreduce_streams=1,
        allreduce_communicators=None,
        gradient_average=True,
        gradient_predivide_factor=1.0,
        gradient_average_split_factor=None,
        prof=False,
    ):
        super().__init__()
        if shared_param is not None:
            raise ValueError(
                "shared_param is gone: parameters may be shared without it. Leave it out, or write "
                f"delay_allreduce={bool(shared_param)} to reduce at the end of the backward pass"
            )
        if delay_allreduce and num_allreduce_streams > 1:
            raise ValueError("num_allreduce_streams > 1 has nothing to overlap with delay_allreduce=True")
        if delay_allreduce and allreduce_trigger_params is not None:
            raise ValueError("allreduce_trigger_params has nothing to trigger with delay_allreduce=True")
        if gradient_average_split_factor is not None:
            warnings.warn(
                "gradient_average_split_factor is called gradient_predivide_factor now",
                DeprecationWarning,
                stacklevel=2,
            )
            gradient_predivide_factor = gradient_average_split_factor
        if not isinstance(message_size, numbers.Real):
            raise TypeError(f"message_size must be a number of elements, not {message_size!r}")
        if not isinstance(num_allreduce_streams, int):
            raise TypeError(f"num_allreduce_streams must be a whole number, not {num_allreduce_streams!r}")
        if not gradient_predivide_factor > 0:
            raise ValueError(f"gradient_predivide_factor must be above 0, not {gradient_predivide_factor}")
        if allreduce_communicators is not None:
            _check_communicators(allreduce_communicators, num_allreduce_streams)
        _check_initialized("DistributedDataParallel")
        _check_parameters(module)

        self.module = module
        self.message_size = message_size
        self.delay_allreduce = delay_allreduce
        self.retain_allreduce_buffers = retain_allreduce_buffers
        self.allreduce_always_fp32 = allreduce_always_fp32
        self.num_allreduce_streams = num_allreduce_streams
        self.gradient_average = gradient_average
        self.gradient_predivide_factor = gradient_predivide_factor
        self.prof = prof
        self._triggers = None
        if allreduce_trigger_params is not None:
            wanted = {id(p) for p in allreduce_trigger_params}
            self._triggers = {i for i, p in enumerate(module.parameters()) if id(p) in wanted}
        self._disable_allreduce = False
        self._live = _Live(allreduce_communicators)
        self._make_groups()
        _broadcast_parameters(module)
        self.create_hooks()

    @property
    def needs_refresh(self):
        return self._live.needs_refresh

    @needs_refresh.setter
    def needs_refresh(self, value):
        self._live.needs_refresh = value

    @property
    def active_params(self):
        return self._live.params

    @property
    def allreduce_buffers(self):
        return self._live.buffers

    def __getstate__(self):
        """Options and the module: a copy has hooks, streams and process groups of its own."""
        return {name: value for name, value in vars(self).items() if name != "_live"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self._live = _Live()
        self.create_hooks()

    # ---- what a training script calls --------------------------------------------------------------------

    def enable_allreduce(self):
        """Backward passes reduce again."""
        self._disable_allreduce = False

    def disable_allreduce(self):
        """From now on backward passes only add to this rank's gradients."""
        self._disable_allreduce = True

    def forward(self, *inputs, **kwargs):
        result = self.module(*inputs, **kwargs)
        if torch.is_grad_enabled() and not self._disable_allreduce:
            self._await_backward(result)
        return result

    @torch.compiler.disable
    def _await_backward(self, result):
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpoint runs the forward pass again, inside a backward pass
        with self._range("forward pass DDP logic"):
            self._live.forget_pass()
            self.create_hooks()
            # A checkpoint inside the module runs backward passes of its own, whose end is not that of the
            # whole; so the end is asked for where the outermost pass begins.
            begin = _weakly(self, "_queue_epilogue")
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                    leaf.grad_fn.register_prehook(begin)

    # ---- which gradients travel together -----------------------------------------------------------------

    def create_hooks(self):
        """Watches the parameters that require gradients. If others do than before, buckets are found anew."""
        params = [p for p in self.module.parameters() if p.requires_grad]
        live = self._live
        if len(params) == len(live.params) and all(map(operator.is_, params, live.params)):
            return
        for handle in live.handles:
            handle.remove()
        hook = _weakly(self, "_gradient_ready")
        live.handles = [p.register_post_accumulate_grad_hook(hook) for p in params]
        live.params = params
        live.needs_refresh = True

    def sync_bucket_structure(self):
        """Makes the buckets from the order in which gradients came on rank 0. Every rank must call it."""
        live = self._live
        params = live.params
        if self.delay_allreduce:
            live.set_buckets(by_type(params))
        else:
            triggers = None
            if self._triggers is not None:
                triggers = {id(p) for i, p in enumerate(self.module.parameters()) if i in self._triggers}
            plan = plan_buckets(params, list(live.arrived.values()), self.message_size, triggers)
            pairs = [(number, i) for number, bucket in enumerate(plan) for i in bucket]
            pairs = torch.tensor(pairs, dtype=torch.int64, device=params[0].device)
            dist.broadcast(pairs, 0)
            buckets = {}
            for number, i in pairs.tolist():
                buckets.setdefault(number, []).append(params[i])
            live.set_buckets(buckets.values())
        self._make_groups()
        live.needs_refresh = False

    def _make_groups(self):
        live = self._live
        if live.groups is None:
            count = self.num_allreduce_streams
            live.groups = [dist.new_group() for _ in range(count)] if count > 1 else [None]

    # ---- the backward pass -------------------------------------------------------------------------------

    def _queue_epilogue(self, *_):
        live = self._live
        if not live.callback_queued and not self._disable_allreduce:
            live.callback_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._epilogue)

    def _gradient_ready(self, param):
        """Called when the backward pass has added to param.grad."""
        if self._disable_allreduce:
            return
        live = self._live
        with live.lock, self._range("allreduce_hook"):
            live.begun = True
            self._queue_epilogue()
            if live.needs_refresh:
                live.arrived.setdefault(id(param), param)
            elif not self.delay_allreduce:
                self.comm_ready_buckets(param)

    def comm_ready_buckets(self, param):
        """Reduces the buckets that are full with this parameter's gradient, in the same order on all ranks."""
        live = self._live
        number = live.bucket_of[id(param)]
        bucket = live.buckets[number]
        if id(param) in bucket.ready and number < live.next:
            raise RuntimeError(
                f"{_namer(self.module)(param)} got a gradient twice in one backward pass, after its bucket was "
                "sent: a checkpoint with use_reentrant=True shares it. Use checkpoint(..., "
                "use_reentrant=False), or DistributedDataParallel(..., delay_allreduce=True)"
            )
        bucket.ready.add(id(param))
        if param.device.type != "cpu":
            bucket.streams.add(torch.get_device_module(param.device).current_stream(param.device))
        with self._range("comm_ready_buckets"):
            while live.next < len(live.buckets) and live.buckets[live.next].full:
                self._reduce_beside(live.next)

    def _reduce_beside(self, number):
        """Starts the reduction of a full bucket beside the rest of the backward pass."""
        live = self._live
        bucket = live.buckets[number]
        device = bucket.params[0].device
        if device.type == "cpu":
            self._start(number)
            return
        # Gathered between the backward pass's own kernels, which a copy beside them would wait for: matrix products
        # leave no room on the device. Messages and the writing of results find theirs as these end.
        module = torch.get_device_module(device)
        here = module.current_stream(device)
        for stream in bucket.streams:
            here.wait_stream(stream)
        reduction = self._start(number)
        with module.stream(live.side_stream(number % self.num_allreduce_streams, device)):
            self._finish(number, reduction)

    def _start(self, number):
        live = self._live
        if live.next == 0:
            live.buffers = [None] * len(live.buckets) if self.retain_allreduce_buffers else []
        live.next = number + 1
        group = live.groups[number % len(live.groups)]
        params = live.buckets[number].params
        live.reductions[number] = Reduction(params, self._averaging(), group, _namer(self.module))
        return live.reductions[number]

    def _averaging(self):
        return Averaging(self.gradient_average, self.gradient_predivide_factor, self.allreduce_always_fp32)

    def _finish(self, number, reduction):
        buffer = reduction.finish(self.retain_allreduce_buffers)
        if self.retain_allreduce_buffers:
            self._live.buffers[number] = buffer

    def _epilogue(self):
        """Called when the backward pass is over: reduces what is left, and waits."""
        live = self._live
        live.callback_queued = False
        if not live.begun:
            return  # torch.autograd.grad: no parameter got a gradient
        with self._range("allreduce_epilogue"):
            if live.needs_refresh:
                self.sync_bucket_structure()
            for (_, device), side in live.streams.items():
                torch.get_device_module(device).current_stream(device).wait_stream(side)
            for number in range(live.next, len(live.buckets)):
                self._start(number)
            for number, reduction in live.reductions.items():
                if not reduction.finished:
                    self._finish(number, reduction)
            live.forget_pass()

    # ---- to be called by hand, after passes that did not reduce; the hooks do not go this way --------------

    def allreduce_fallback(self):
        """Reduces all gradients now, in one message for each dtype. Every rank must call it.

        A parameter that has a gradient on some ranks only counts as 0 on the others.
        """
        params = [p for p in self.module.parameters() if p.requires_grad]
        averaging, name_of = self._averaging(), _namer(self.module)
        reductions = [Reduction(bucket, averaging, name_of=name_of) for bucket in by_type(params)]
        buffers = [reduction.finish(self.retain_allreduce_buffers) for reduction in reductions]
        self._live.buffers = buffers if self.retain_allreduce_buffers else []

    @torch.no_grad()
    def allreduce_bucket(self, bucket, bucket_idx, force_default_stream):
        """Reduces dense tensors of one dtype and device, in one message; returns them flat.

        The tensors themselves change too, unless retain_allreduce_buffers is set. bucket_idx: whose turn among
        num_allreduce_streams process groups it is; with force_default_stream the default group reduces.
        """
        self._make_groups()
        averaging, groups = self._averaging(), self._live.groups
        flat = flatten(bucket)
        summed = flat.float() if averaging.always_float32 and flat.dtype in HALVES else flat
        if averaging.predivide != 1.0:
            summed.mul_(1.0 / averaging.predivide)
        dist.all_reduce(summed, group=None if force_default_stream else groups[bucket_idx % len(groups)])
        flat.copy_(summed.mul_(averaging.factor))
        if not self.retain_allreduce_buffers:
            torch._foreach_copy_(list(bucket), list(unflatten(flat, bucket)))
        return flat

    @torch.no_grad()
    def allreduce_maybe_retain(self, bucket, bucket_idx, force_default_stream=False):
        """`allreduce_bucket`; where buffers are retained, allreduce_buffers[bucket_idx] is the result and the
        tensors are views of it."""
        flat = self.allreduce_bucket(bucket, bucket_idx, force_default_stream)
        if self.retain_allreduce_buffers:
            buffers = self._live.buffers
            buffers.extend([None] * (bucket_idx + 1 - len(buffers)))
            buffers[bucket_idx] = flat
            for tensor, view in zip(bucket, unflatten(flat, bucket), strict=True):
                tensor.data = view

    def _range(self, name):
        return _named(name) if self.prof else _UNNAMED


class _Live:
    """What belongs to one object in one process, and is neither copied nor pickled.

    Attributes:
        params, handles: parameters that require gradients, and the hooks on them.
        needs_refresh: `buckets` are to be found out by the next backward pass.
        buckets, bucket_of: the buckets, and the number of each parameter's, by id.
        groups, streams: process groups, and {(turn, device): stream}, that take turns.
        buffers: reduced buckets, if they are retained.

    and of one backward pass:
        begun: a parameter got its gradient.
        callback_queued: the engine calls _epilogue when it is over.
        arrived: id -> parameter in the order of their gradients, while that is being found out.
        next: number of the first bucket that was not started.
        reductions: {number: Reduction}.
    """

    def __init__(self, communicators=None):
        self.params, self.handles = [], []
        self.needs_refresh = True
        self.buckets, self.bucket_of = [], {}
        self.groups = None if communicators is None else list(communicators[0])
        self.given_streams = None if communicators is None else list(communicators[1])
        self.streams = {}
        self.buffers = []
        self.lock = threading.RLock()  # parameters on several devices get their gradients in several threads
        self.forget_pass()

    def forget_pass(self):
        self.begun = False
        self.callback_queued = False
        self.arrived = {}
        self.next = 0
        self.reductions = {}
        for bucket in self.buckets:
            bucket.empty()

    def set_buckets(self, buckets):
        self.buckets = [Bucket(list(params)) for params in buckets]
        self.bucket_of = {id(p): number for number, b in enumerate(self.buckets) for p in b.params}

    def side_stream(self, turn, device):
        """Where results are written: ahead of the backward pass's next kernel, once the one before it ends."""
        if (turn, device) not in self.streams:
            if self.given_streams:
                stream = self.given_streams[turn]
            else:
                stream = torch.get_device_module(device).Stream(device=device, priority=-1)
            self.streams[turn, device] = stream
        return self.streams[turn, device]


_UNNAMED = contextlib.nullcontext()


@contextlib.contextmanager
def _named(name):
    with torch.profiler.record_function(name):
        if torch.cuda.is_available():
            torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            if torch.cuda.is_available():
                torch.cuda.nvtx.range_pop()


def _weakly(owner, name):
    """owner.name as a function that does not keep `owner` alive, and does nothing when it is gone."""
    reference = weakref.ref(owner)

    def call(*args):
        owner = reference()
        if owner is not None:
            getattr(owner, name)(*args)

    return call


def _namer(module):
    """parameter -> its name, looked up when it is asked for."""
    return lambda param: next((n for n, p in module.named_parameters() if p is param), "a parameter")


# ---- when it is made -------------------------------------------------------------------------------------


def _check_initialized(who):
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"{who} needs a process group: call torch.distributed.init_process_group first "
            "(python -m apex.parallel.multiproc script.py starts the processes)"
        )


def _check_communicators(communicators, count):
    lengths = [len(part) for part in communicators]
    if count < 2 or lengths != [count, count]:
        raise ValueError(
            "allreduce_communicators is (process groups, streams), num_allreduce_streams of each and more than "
            f"1; got {' and '.join(map(str, lengths)) or 'none'} with num_allreduce_streams={count}"
        )


def _check_parameters(module):
    for name, p in module.named_parameters():
        if torch.nn.parameter.is_lazy(p):
            raise RuntimeError(f"{name} has no shape yet: run the module once before it is wrapped")
        if p.device.type == "cpu" and dist.get_backend() == "nccl":
            raise RuntimeError(
                f"{name} is on the CPU, which the NCCL backend cannot reach: move the module before it is "
                'wrapped, or use init_process_group("gloo")'
            )


def _broadcast_parameters(module):
    """Rank 0's parameters, and amp's master weights of them, on every rank, once all are known to hold the same."""
    from apex.amp._amp_state import _amp_state  # all of amp comes with it

    params = list(module.parameters())
    if not params:
        return
    masters = [master for master in map(_amp_state.masters.get, params) if master is not None]
    kinds = repr([(p.dtype, tuple(p.shape), p.requires_grad) for p in (*params, *masters)])
    checksum = zlib.crc32(kinds.encode())
    largest = torch.tensor([checksum, -checksum], dtype=torch.int64, device=params[0].device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    if largest[0] != -largest[1]:
        raise RuntimeError(
            f"the parameters of rank {dist.get_rank()} ({len(params)}) differ from another rank's in number, "
            "shape, dtype or requires_grad: build the same module on every rank"
        )
    flat_dist_call([p.data for p in params], dist.broadcast, (0,))
    if masters:
        flat_dist_call([p.detach() for p in masters], dist.broadcast, (0,))
