"""DistributedDataParallel and Reducer: the mean of gradients over the ranks of torch.distributed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from apex.parallel import _checks, _status
from apex.parallel._buckets import by_type, plan_buckets
from apex.parallel._flat import (  # noqa: F401  public apex has them here
    apply_flat_dist_call,
    extract_tensors,
    flat_dist_call,
    flatten,
    import_flatten_impl,
    split_by_type,
    split_half_float_double,
    split_half_float_double_bfloat16,
    unflatten,
)
from apex.parallel._live import UNNAMED, BackwardPass, Live, named, weakly
from apex.parallel._reducer import Reducer, agree_on_change, namer, reduce_all, same, trained  # noqa: F401  Reducer: as in public apex
from apex.parallel._reduction import HALVES, Averaging, Reduction
from apex.parallel._waiting import CALLS, waiting
from apex.parallel.process_groups import timeout_of


class DistributedDataParallel(torch.nn.Module):
    """A module whose gradients become their mean over all ranks while backward() runs.

        torch.distributed.init_process_group(...)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")     # if amp is used, first
        model = apex.parallel.DistributedDataParallel(model)

    Parameters (not buffers) are broadcast from rank 0 when it is made. The first backward pass finds out in
    which order gradients come; rank 0's order decides which ones travel together, and from the second pass on
    each bucket but the last is reduced as soon as it is full, beside the rest of the backward pass: on an
    accelerator on a stream of its own, on the CPU by the process group's threads. When backward() returns,
    gradients are reduced (on an accelerator: for what is queued on the current stream from then on).

    A parameter that got no gradient on this rank, but did on another, counts as 0 here and gets the mean; one
    that no rank used keeps None. So does a whole pass that reaches no parameter, if it goes through what forward()
    returned; a rank that has no such pass calls `empty_backward()`. If a parameter lacks its gradient here the
    host waits once for the device; `requires_grad_(False)` on parameters that are never used saves that, and their
    share of the messages.

    A pass that raises on one rank raises on every rank, and nothing of it is left: see docs/parallel.md.

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
            reach the parameters; backward() reaches a parameter again whose bucket is under way; another rank's
            pass raised (an accelerator tells at the end of the next pass), or ended without its part; parameters
            come to require gradients, or no longer do, on some ranks only.
        ValueError: options that do not go together.
        TypeError: an option of another type; a sparse gradient.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10000000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: Sequence[torch.Tensor] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Sequence | None = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        super().__init__()
        factor = _checks.factor_of(gradient_predivide_factor, gradient_average_split_factor)
        _checks.check_options(
            message_size, delay_allreduce, shared_param, allreduce_trigger_params, num_allreduce_streams,
            allreduce_communicators, factor,
        )  # fmt: skip
        _checks.check_initialized("DistributedDataParallel")
        _checks.check_parameters(module)

        self.module = module
        self.message_size = message_size
        self.delay_allreduce = delay_allreduce
        self.retain_allreduce_buffers = retain_allreduce_buffers
        self.allreduce_always_fp32 = allreduce_always_fp32
        self.num_allreduce_streams = num_allreduce_streams
        self.gradient_average = gradient_average
        self.gradient_predivide_factor = factor
        self.prof = prof
        self._triggers = None
        if allreduce_trigger_params is not None:
            wanted = {id(p) for p in allreduce_trigger_params}
            self._triggers = {i for i, p in enumerate(module.parameters()) if id(p) in wanted}
        self._disable_allreduce = False
        self._live = Live(allreduce_communicators)
        self._make_groups()
        _checks.broadcast_parameters(module)
        self.create_hooks()

    @property
    def needs_refresh(self) -> bool:
        return self._live.needs_refresh

    @needs_refresh.setter
    def needs_refresh(self, value: bool) -> None:
        self._live.needs_refresh = value

    @property
    def active_params(self) -> list[torch.Tensor]:
        return self._live.params

    @property
    def allreduce_buffers(self) -> list:
        return self._live.buffers

    def __getstate__(self):
        """Options and the module: a copy has hooks, streams and process groups of its own."""
        return {name: value for name, value in vars(self).items() if name != "_live"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self._live = Live()
        self.create_hooks()

    # ---- what a training script calls --------------------------------------------------------------------

    def enable_allreduce(self) -> None:
        """Backward passes reduce again."""
        self._disable_allreduce = False

    def disable_allreduce(self) -> None:
        """From now on backward passes only add to this rank's gradients."""
        self._disable_allreduce = True

    def empty_backward(self) -> None:
        """What backward() is on the other ranks, for a rank that has no loss: it counts as 0 here.

        Gradients that are there already take part, as in any pass.
        """
        if not self._disable_allreduce:
            self._live.forget_pass()
            self.create_hooks()
            self._epilogue(True)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        result = self.module(*inputs, **kwargs)
        if torch.is_grad_enabled() and not self._disable_allreduce:
            self._await_backward(result)
        return result

    @torch.compiler.disable
    def _await_backward(self, result):
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpoint runs the forward pass again, inside a backward pass
        with self._range("forward pass DDP logic"):
            live = self._live
            if live.running() is not None:
                self._abandon(live.running())  # it raised, and the engine has not yet let it go
            live.forget_pass()
            self.create_hooks()
            # A checkpoint inside the module runs backward passes of its own, whose end is not that of the
            # whole; so the end is asked for where the outermost pass begins.
            begin = weakly(self, "_outermost_pass_begins")
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                    leaf.grad_fn.register_prehook(begin)
                elif isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    live.leaves.append(leaf.register_hook(begin))

    # ---- which gradients travel together -----------------------------------------------------------------

    def create_hooks(self) -> None:
        """Watches the parameters that require gradients. If others do than before, buckets are found anew."""
        params = trained(self.module)
        live = self._live
        if same(params, live.params):
            return
        for handle in live.handles:
            handle.remove()
        hook = weakly(self, "_gradient_ready")
        live.handles = [p.register_post_accumulate_grad_hook(hook) for p in params]
        live.params = params
        live.needs_refresh = True
        if not live.buckets:
            live.set_buckets(by_type(params), False)

    def sync_bucket_structure(self) -> None:
        """Makes the buckets from the order in which gradients came on rank 0. Every rank must call it."""
        live = self._live
        params = live.params
        if self.delay_allreduce or not params:
            live.set_buckets(by_type(params), True)
        else:
            triggers = None
            if self._triggers is not None:
                triggers = {id(p) for i, p in enumerate(self.module.parameters()) if i in self._triggers}
            plan = plan_buckets(params, list(live.arrived.values()), self.message_size, triggers)
            pairs = [(number, i) for number, bucket in enumerate(plan) for i in bucket]
            pairs = torch.tensor(pairs, dtype=torch.int64, device=params[0].device)
            with waiting("the order of gradients") as wait:
                wait.run(dist.broadcast, pairs, 0)
            buckets: dict = {}
            for number, i in pairs.tolist():
                buckets.setdefault(number, []).append(params[i])
            live.set_buckets(buckets.values(), True)
        self._make_groups()
        live.needs_refresh = False

    def _make_groups(self):
        live = self._live
        if live.groups is None:
            count = self.num_allreduce_streams
            timeout = timeout_of()
            with waiting("process groups for num_allreduce_streams"):
                live.groups = [dist.new_group(timeout=timeout) for _ in range(count)] if count > 1 else [None]

    # ---- the backward pass -------------------------------------------------------------------------------

    def _outermost_pass_begins(self, *_):
        live = self._live
        if self._disable_allreduce:
            return
        with live.lock:
            running = live.running()
            if running is not None and running.task != torch._C._current_graph_task_id():
                self._abandon(running)  # it raised, and the engine has not yet let it go
            self._queue_epilogue(torch._C._current_autograd_node())

    def _queue_epilogue(self, node=None):
        live = self._live
        if live.running() is None:
            this = BackwardPass(self, node)
            live.current = weakref.ref(this)
            torch.autograd.Variable._execution_engine.queue_callback(this)

    def _gradient_ready(self, param):
        """Called when the backward pass has added to param.grad."""
        if self._disable_allreduce:
            return
        live = self._live
        with live.lock, self._range("allreduce_hook"):
            self._queue_epilogue()
            live.begun = True
            if live.needs_refresh:
                live.arrived.setdefault(id(param), param)
            elif not self.delay_allreduce:
                self.comm_ready_buckets(param)

    def comm_ready_buckets(self, param: torch.Tensor) -> None:
        """Reduces the buckets that are full with this parameter's gradient, in the same order on all ranks.

        The last one waits for the end of the pass: by it a rank tells the others whether its pass raised.
        """
        live = self._live
        number = live.bucket_of[id(param)]
        bucket = live.buckets[number]
        if id(param) in bucket.ready and number < live.next:
            raise RuntimeError(
                f"{namer(self.module)(param)} got a gradient twice in one backward pass, after its bucket was "
                "sent: a checkpoint with use_reentrant=True shares it. Use checkpoint(..., "
                "use_reentrant=False), or DistributedDataParallel(..., delay_allreduce=True)"
            )
        bucket.ready.add(id(param))
        if param.device.type != "cpu":
            bucket.streams.add(torch.get_device_module(param.device).current_stream(param.device))
        with self._range("comm_ready_buckets"):
            while live.next < len(live.buckets) - 1 and live.buckets[live.next].full:
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

    def _start(self, number, status=_status.FINE):
        live = self._live
        if live.next == 0:
            live.buffers = [None] * len(live.buckets) if self.retain_allreduce_buffers else []
        group = live.groups[number % len(live.groups)]
        params = live.buckets[number].params
        reduction = Reduction(params, self._averaging(), group, namer(self.module), status)
        live.next = number + 1
        if status is _status.FINE:
            live.reductions[number] = reduction
        return reduction

    def _averaging(self):
        return Averaging(self.gradient_average, self.gradient_predivide_factor, self.allreduce_always_fp32)

    def _finish(self, number, reduction):
        buffer = reduction.finish(self.retain_allreduce_buffers)
        if self.retain_allreduce_buffers:
            self._live.buffers[number] = buffer

    def _epilogue(self, accumulates):
        """Called when the backward pass is over: reduces what is left, and waits.

        accumulates: whether the pass counts even if no parameter got a gradient: not in torch.autograd.grad.
        """
        live = self._live
        if not (live.begun or accumulates):
            live.forget_pass()
            return
        with self._range("allreduce_epilogue"):
            who = type(self).__name__
            self._make_groups()
            self._end_abandoned()
            before = live.late.read()
            if live.needs_refresh and (live.ordered or not live.has_bucket_of_all(live.params)):
                self._change_buckets(who)
            for (_, device), side in live.streams.items():
                torch.get_device_module(device).current_stream(device).wait_stream(side)
            for number in range(live.next, len(live.buckets)):
                self._start(number)
            if live.reductions:
                late = None if live.needs_refresh else live.late
                live.reductions[len(live.buckets) - 1].check(who, late)
            for number, reduction in live.reductions.items():
                if not reduction.finished:
                    self._finish(number, reduction)
                reduction.release(live.buckets[number].params[0].device)
            if live.needs_refresh:
                self.sync_bucket_structure()
            live.forget_pass()
            live.forget_leaves()
            _status.check(*before, who)

    def _change_buckets(self, who):
        """All ranks go over to the buckets of the parameters that require gradients now, or all raise."""
        live = self._live

        def send(number):
            return self._start(number, _status.CHANGED)

        old = [bucket.params for bucket in live.buckets]
        agree_on_change(old, live.params, who, send, self.module.parameters())
        live.set_buckets(by_type(live.params), False)
        live.next = 0

    # ---- a pass that raised ------------------------------------------------------------------------------

    @torch.no_grad()
    def _abandon(self, raised):
        """A pass raised on this rank: it ends for the others, who wait for each bucket, and raises there.

        Comes as the engine drops the pass, before anybody can catch the exception and speak to other ranks.
        """
        live = self._live
        with live.lock:
            raised.over = True
            if live.running() not in (None, raised):
                return
            if (live.begun or raised.accumulates) and dist.is_initialized():
                live.closing += live.reductions.values()
                self._make_groups()
                for number in range(live.next, len(live.buckets)):
                    live.closing.append(self._start(number, _status.RAISED))
            live.forget_pass()
            live.forget_leaves()

    def _end_abandoned(self):
        closing, self._live.closing = self._live.closing, []
        for reduction in closing:
            reduction.wait()

    # ---- to be called by hand, after passes that did not reduce; the hooks do not go this way --------------

    def allreduce_fallback(self) -> None:
        """Reduces all gradients now, in one message for each dtype. Every rank must call it.

        A parameter that has a gradient on some ranks only counts as 0 on the others.
        """
        self.create_hooks()
        live = self._live
        if not live.has_bucket_of_all(live.params):
            self._change_buckets(type(self).__name__)
        retain, name_of = self.retain_allreduce_buffers, namer(self.module)
        buffers = reduce_all(by_type(live.params), self._averaging(), type(self).__name__, name_of, retain)
        live.buffers = buffers if retain else []

    @torch.no_grad()
    def allreduce_bucket(
        self, bucket: Sequence[torch.Tensor], bucket_idx: int, force_default_stream: bool
    ) -> torch.Tensor:
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
        group = None if force_default_stream else groups[bucket_idx % len(groups)]
        with waiting("a bucket of gradients", CALLS, group=group) as wait:
            wait.run(dist.all_reduce, summed, group=group)
        flat.copy_(summed.mul_(averaging.factor))
        if not self.retain_allreduce_buffers:
            torch._foreach_copy_(list(bucket), list(unflatten(flat, bucket)))
        return flat

    @torch.no_grad()
    def allreduce_maybe_retain(
        self, bucket: Sequence[torch.Tensor], bucket_idx: int, force_default_stream: bool = False
    ) -> None:
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
        return named(name) if self.prof else UNNAMED
