"""What optimizers have in common whose state is sharded over data-parallel ranks (ZeRO-2)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from apex.contrib.optimizers import _contiguous, _options, _pending
from apex.contrib.optimizers._buckets import Layout, ParameterFragment, StateBucket
from apex.contrib.optimizers._flat import flat
from apex.contrib.optimizers._gradients import GradientBucket, Gradients
from apex.contrib.optimizers._listening import Listening
from apex.contrib.optimizers._parameters import ParameterBucket, Parameters
from apex.contrib.optimizers._placement import Placement, name_of
from apex.contrib.optimizers._saving import Saving
from apex.contrib.optimizers._scaling import ScaledGradients
from apex.optimizers._amp_c import OverflowFlag
from apex.optimizers._arguments import evaluate


class ShardedOptimizer(Placement, Listening, ScaledGradients, Saving, torch.optim.Optimizer):
    """Gradients, state and checkpoints in shards; a subclass says what a step does with this rank's.

    A subclass sets the attributes that `_make` reads, calls it, and has `_update_shards`.
    """

    overlap_grad_sync: bool
    nccl_ub = False  # whether contiguous buffers are registered with NCCL
    _pool: Any = None  # of their memory
    skip_allgather = False  # step() leaves parameters to be gathered by param_sync()
    _unpack = None  # parameters as they arrive -> as the model takes them
    ParameterFragment = ParameterFragment
    StateBucket = StateBucket
    GradientBucket = GradientBucket
    ParameterBucket = ParameterBucket
    _dummy_overflow_buf = OverflowFlag()

    _step_supports_amp_scaling = True  # torch.amp.GradScaler hands itself to step()
    _custom_amp_unscale_grads = True  # Megatron's and NeMo's GradScaler calls unscale_grads()

    # ---- making ---------------------------------------------------------------------------------------

    def _make(self, params, defaults, ranks, device):
        """Takes the parameters. device: as the subclass was given it.

        Reads dtype, grad_sync_dtype, param_sync_dtype, store_params, store_param_remainders, with_scaled_states,
        capturable, average_grad_sync, overlap_grad_sync, overlap_param_sync, contiguous_param_buffer,
        contiguous_grad_buffer, pipeline_size and default_shard_size.
        """
        self._take(ranks)
        self.greedy_grad_copy = True  # gradients are copied as soon as they are there
        self.alignment = 128 // self.grad_sync_dtype.itemsize
        self._lock = threading.RLock()
        self.device = None
        super().__init__(params, defaults)
        self._begin(_options.device_of(list(self.parameters()), device))

    def _take(self, ranks):
        """Their groups, by public apex's names, too."""
        self._ranks = ranks
        self.process_group, self.process_group_size = ranks.everyone, ranks.count
        self.process_group_root = ranks.root
        self.distributed_process_group, self.distributed_size = ranks.distributed, ranks.shards
        self.distributed_rank = ranks.rank
        self.redundant_process_group, self.redundant_size = ranks.redundant, ranks.copies

    def _begin(self, device):
        """What needs to know where the parameters are."""
        self.device = device
        self.state["step"] = torch.zeros(1, dtype=torch.int32, device=device) if self.capturable else 0
        self.state["buckets"] = []
        self._grad_scale = torch.ones([], dtype=torch.float32, device=device)
        self._grad_norm = None  # of all gradients, before _grad_scale
        self._unscaled = False
        self._layout = Layout(
            self.state["buckets"],
            self.distributed_size,
            self.distributed_rank,
            self.default_shard_size,
            self.alignment,
        )
        self._parameters = Parameters(self._ranks, self.pipeline_size, device)
        self._gradients = Gradients(
            self._ranks,
            device,
            self.average_grad_sync,
            self.pipeline_size,
            self._parameters.start_all,
            self._trained,
            self._materialize,
        )
        self._param_buffers = {}  # dtypes of buckets -> their parameters
        self._grad_buffers = []
        self._place = {}  # parameter -> (group, place in the group)
        self._strides = {}  # parameter -> what they were when its elements were placed
        self._places = []  # of each bucket
        self._nodes = []  # of autograd, that have our hooks: they live as long as we do
        for index in range(len(self.param_groups)):
            self._adopt(index)
        self._broadcast_params()

    def _adopt(self, index):
        """Takes the parameters of a group: checks them, and listens to them."""
        group = self.param_groups[index]
        for place, p in enumerate(group["params"]):
            _options.check_parameter(name_of(index, place), p, self.device)
        self._complete = False
        for place, p in enumerate(group["params"]):
            self._place[p] = index, place
        self._listen()
        if self.capturable:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=self.device).clone()

    def _broadcast_params(self, params=None):
        """Gives parameters (None: all) the values that they have on the first rank, once they are known to be alike."""
        params = list(self.parameters() if params is None else params)
        alike = [(tuple(p.shape), p.stride(), p.dtype) for p in params]
        self._ranks.check_same("numbers, shapes, memory formats or dtypes of parameters", str(alike))
        self._ranks.broadcast([flat(p) for p in params])

    def _trained(self):
        """{(group, place): whether that parameter requires a gradient}."""
        return {key: p.requires_grad for p, key in self._place.items()}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.device is not None:
            self._gradients.settle()
        super().add_param_group(param_group)
        if self.device is not None:
            self._adopt(len(self.param_groups) - 1)
            self._broadcast_params(self.param_groups[-1]["params"])

    def __getstate__(self):
        raise TypeError(
            f"{type(self).__name__} belongs to its ranks and cannot be copied: make another one, and give it "
            "state_dict() of this one"
        )

    # ---- gradients -------------------------------------------------------------------------------------

    @_pending.untouched
    def zero_grad(self, set_to_none: bool = False) -> None:
        """Drops gradients, under way or not, and undoes clip_grad_norm and unscale_grads.

        With contiguous_grad_buffer, unless set_to_none, `p.grad` becomes a zeroed view of the buffer where its
        dtype is grad_sync_dtype; any other gradient that is left in `p.grad` is zeroed, or dropped.
        """
        if self.contiguous_grad_buffer:
            self._materialize()
        self._gradients.reset()
        for buffer in self._grad_buffers:
            buffer.zero_()
        for p in self.parameters():
            if set_to_none:
                p.grad = None
            elif self.contiguous_grad_buffer and p.requires_grad and self._grad_dtype(p) == p.dtype:
                p.grad = self.grad_buffer_view(p)
            elif p.grad is not None:
                p.grad.zero_()
        self._grad_scale.fill_(1.0)
        self._grad_norm = None
        self._unscaled = False

    def _grad_dtype(self, p):
        fragments = self.state[p]["fragments"]
        return self.state["buckets"][fragments[0].bucket_id].grad_sync_dtype if fragments else p.dtype

    @torch.no_grad()
    def _grad_copy(self, param):
        """Adds a parameter's gradient to its buckets, and drops it."""
        self._materialize()
        self._gradients.add([(param, self.state[param]["fragments"])])
        self._grad_norm = None

    @torch.no_grad()
    def _try_start_bucket_grad_sync(self, params=None, ignore_last_bucket=False):
        """Starts to reduce buckets that are full now that `params` have their gradients in them."""
        self._materialize()
        for p in params or ():
            self._gradients.saw(self._place[p])
        self._gradients.start_full()

    @torch.no_grad()
    def _finish_bucket_grad_sync(self):
        """Waits for the reductions that are under way."""
        self._gradients.finish()

    @contextlib.contextmanager
    def no_sync(self, greedy_grad_copy: bool = False) -> Iterator[None]:
        """Gradients of passes within accumulate on this rank, to be reduced by a later pass, grad_sync or step.

        greedy_grad_copy: they do in the buckets; otherwise in `p.grad`.
        """
        old = self.greedy_grad_copy, self.overlap_grad_sync
        self.greedy_grad_copy, self.overlap_grad_sync = greedy_grad_copy, False
        try:
            yield
        finally:
            self.greedy_grad_copy, self.overlap_grad_sync = old

    def _before_reduction(self):
        """Called when this rank's gradients are in their buckets, before the rest of these is reduced."""

    @torch.no_grad()
    def grad_sync(self) -> None:
        """Every rank's shards hold the mean (or sum) of all gradients so far. Every rank must call it."""
        self._materialize()
        left = [(p, self.state[p]["fragments"]) for p in self.parameters() if p.grad is not None]
        if left:
            self._gradients.add(left)
            self._grad_norm = None
        self._before_reduction()
        self._gradients.sync()

    # ---- the step --------------------------------------------------------------------------------------

    @torch.no_grad()
    def param_sync(self) -> None:
        """Every parameter has its value of the last step."""
        self._parameters.finish()

    @torch.no_grad()
    def _try_start_bucket_param_sync(self, params=None):
        """Starts to gather the buckets of `params`, and those before them; None: the next one."""
        self._parameters.start(params)

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, grad_scaler: torch.amp.GradScaler | None = None
    ) -> Any:
        """One update of all parameters. Every rank must call it.

        closure: evaluates the model again and returns the loss, which step() then returns. grad_scaler: a
        torch.amp.GradScaler, which passes itself; gradients are unscaled here if they were not, and where any
        rank's is not finite nothing is changed.

        Raises RuntimeError if grad_scaler.unscale_() was called: it does not reach gradients in buckets. Likewise
        where the memory format of a parameter has changed since its state was made.
        """
        loss = evaluate(closure)
        self._materialize()
        self.param_sync()
        self._check_strides()
        self.grad_sync()
        found_inf = self._found_inf(grad_scaler)
        self._unscaled = False
        if found_inf is not None and not self.capturable:
            if found_inf.item():
                return loss
            found_inf = None
        if self.contiguous_param_buffer and any(part is None for part in self._param_parts()):
            self.init_param_buffer()
        counted = self._count(found_inf)
        order = self._gradients.order[::-1]  # as the model reads parameters
        try:
            shards = self._update_shards(order, found_inf)
        except BaseException:
            self.state["step"] -= counted
            raise
        buckets, parts = self.state["buckets"], self._param_parts()
        self._parameters.put(
            [
                ParameterBucket(self._places[i], buckets[i], shard, parts[i], self._unpack)
                for i, shard in zip(order, shards, strict=True)
            ]
        )
        if self.skip_allgather:
            pass
        elif self.overlap_param_sync and self.distributed_size > 1:
            self._parameters.wait_when_used()
        else:
            self._parameters.finish()
        return loss

    def _update_shards(self, order, found_inf):
        """Updates this rank's shards of these buckets; returns what is sent of each."""
        raise NotImplementedError

    def _count(self, found_inf):
        """Counts this step, unless found_inf says otherwise, and returns by how much."""
        counted = 1 if found_inf is None else (found_inf == 0).to(torch.int32)
        self.state["step"] += counted
        return counted

    def _param_parts(self):
        """Each bucket's part of the contiguous parameter buffers; None where there is none."""
        return [_contiguous.part_of(self._param_buffers, bucket) for bucket in self.state["buckets"]]

    def _own(self, part):
        """This rank's shard of a bucket."""
        return None if part is None else part.chunk(self.distributed_size)[self.distributed_rank]
