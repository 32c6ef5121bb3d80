"""DistributedFusedAdam: Adam whose state is sharded over data-parallel ranks (ZeRO-2)."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from apex import _loader
from apex.contrib.optimizers import _checkpoint, _contiguous, _options, _pending
from apex.contrib.optimizers._buckets import Layout, ParameterFragment, StateBucket
from apex.contrib.optimizers._flat import copy_lists, flat
from apex.contrib.optimizers._gradients import GradientBucket, Gradients
from apex.contrib.optimizers._local_step import LocalStep, runs_of
from apex.contrib.optimizers._parameters import ParameterBucket, Parameters, Places
from apex.contrib.optimizers._ranks import Ranks
from apex.contrib.optimizers._scaling import ScaledGradients
from apex.contrib.optimizers._states import model_shard, scale_states, store_parameters
from apex.optimizers._amp_c import OverflowFlag
from apex.optimizers._arguments import check_arguments, evaluate

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

__all__ = ["DistributedFusedAdam"]

_hooks = WeakTensorKeyDictionary()  # parameter -> (reference to its optimizer, handle of the hook)


class DistributedFusedAdam(ScaledGradients, torch.optim.Optimizer):
    """Adam and AdamW with gradients and state sharded over data-parallel ranks (ZeRO-2).

        torch.distributed.init_process_group("nccl")             # or "gloo", on CPUs
        optimizer = DistributedFusedAdam(model.parameters(), lr=1e-3)
        for x, y in batches:
            optimizer.zero_grad()
            loss(model(x), y).backward()                         # reduce-scatters gradients beside it
            optimizer.clip_grad_norm(1.0)
            optimizer.step()                                     # updates a shard, all-gathers parameters

    In the place of torch's DistributedDataParallel and optimizer, which it equals: parameters become the first
    rank's when it is made, gradients their mean over ranks. Parameters lie one after the other in buckets; of
    each bucket every rank keeps one shard of the gradients, of float32 parameters and of both averages, and
    updates that, in one launch for all buckets of a group.

    A gradient leaves `p.grad` when it was copied into its bucket, so clip, unscale and measure by the methods
    below. A parameter that no rank's pass reached has gradient zero, and is decayed; one that does not require
    gradients stays as it is. Values written into parameters after the first step do not last: the float32 ones
    in the shards are the optimizer's.

    Args:
        params: parameters (float32, float16, bfloat16, mixed at will, dense, on one device), or dicts that
            define groups.
        lr, bias_correction, betas, eps, adam_w_mode, weight_decay: as in apex.optimizers.FusedAdam.
        amsgrad: must be False.
        dtype: of the state: float32, float16 or bfloat16.
        grad_sync_dtype: in which gradients are summed; None: dtype.
        param_sync_dtype: in which parameters are gathered; None: dtype. An integer type sends as many leading
            bytes of `dtype` as it has.
        device: where parameters and state are; the default and None: wherever the parameters are.
        process_group: the ranks; None: all.
        distributed_process_group: those to shard over; None: all of process_group.
        redundant_process_group: those that hold the same shard; None: this one alone. The last two make a grid.
        average_grad_sync: mean over ranks, or sum.
        overlap_grad_sync: reduce a bucket as soon as its gradients are there, beside the backward pass.
        overlap_param_sync: step() returns while parameters are under way; whoever uses one waits for it.
        bucket_cap_mb: megabytes (2^20 bytes of grad_sync_dtype) in a bucket at most.
        pipeline_size: buckets under way at once.
        contiguous_param_buffer: parameters become views of large buffers, which are gathered without a copy.
        contiguous_grad_buffer: gradients are views of large buffers; see grad_buffer_view.
        store_params: keep the shard of parameters in `dtype`; without it the model's are updated.
        store_param_remainders: keep in its place the 16 bits that float32 parameters have beyond the model's
            bfloat16 ones: exact, at half the memory.
        with_scaled_states: keep the state in half precision, each parameter's divided by a number of its own
            (FP8-LM, arXiv:2310.18313).
        nccl_ub: must be False.
        capturable: learning rate and step count lie on the device, and nothing waits for the host, so that a
            step can be captured in a CUDA graph and replayed.

    Attributes:
        state: "step", and "buckets": what this rank keeps.

    Raises:
        RuntimeError: torch.distributed is not initialized; groups that make no grid; options that contradict
            each other; amsgrad.
        ValueError: numbers out of bounds; dtypes that are not supported; parameters on several devices.
        TypeError: a parameter of another dtype, one that is not dense, or a wrapper (DTensor, float8 tensor).
        NotImplementedError: nccl_ub; with_scaled_states with capturable.

    Sources: arXiv:1412.6980, arXiv:1711.05101, arXiv:1910.02054; interface and checkpoints of public apex.
    """

    ParameterFragment = ParameterFragment
    StateBucket = StateBucket
    GradientBucket = GradientBucket
    ParameterBucket = ParameterBucket
    _dummy_overflow_buf = OverflowFlag()

    _step_supports_amp_scaling = True  # torch.amp.GradScaler hands itself to step()
    _custom_amp_unscale_grads = True  # Megatron's and NeMo's GradScaler calls unscale_grads()

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        dtype: torch.dtype = torch.float32,
        grad_sync_dtype: torch.dtype | None = None,
        param_sync_dtype: torch.dtype | None = None,
        device: torch.device | str | None = "cuda",
        process_group: dist.ProcessGroup | None = None,
        distributed_process_group: dist.ProcessGroup | None = None,
        redundant_process_group: dist.ProcessGroup | None = None,
        average_grad_sync: bool = True,
        overlap_grad_sync: bool = True,
        overlap_param_sync: bool = False,
        bucket_cap_mb: float = 100.0,
        pipeline_size: int = 2,
        contiguous_param_buffer: bool = False,
        contiguous_grad_buffer: bool = False,
        store_params: bool = True,
        store_param_remainders: bool = False,
        with_scaled_states: bool = False,
        nccl_ub: bool = False,
        capturable: bool = False,
    ) -> None:
        check_arguments(
            "DistributedFusedAdam", amsgrad=amsgrad, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay
        )
        self.dtype = dtype
        self.grad_sync_dtype = dtype if grad_sync_dtype is None else grad_sync_dtype
        self.param_sync_dtype = dtype if param_sync_dtype is None else param_sync_dtype
        self.store_params, self.store_param_remainders = store_params, store_param_remainders
        self.with_scaled_states, self.capturable = with_scaled_states, capturable
        self.nccl_ub = nccl_ub
        self.bucket_cap_mb, self.pipeline_size = bucket_cap_mb, pipeline_size
        _options.check_options(self)

        self._ranks = ranks = Ranks(process_group, distributed_process_group, redundant_process_group)
        self.process_group, self.process_group_size = ranks.everyone, ranks.count
        self.process_group_root = ranks.root
        self.distributed_process_group, self.distributed_size = ranks.distributed, ranks.shards
        self.distributed_rank = ranks.rank
        self.redundant_process_group, self.redundant_size = ranks.redundant, ranks.copies

        self.adam_w_mode, self.amsgrad = adam_w_mode, amsgrad
        self.average_grad_sync = average_grad_sync
        self.overlap_grad_sync, self.overlap_param_sync = overlap_grad_sync, overlap_param_sync
        self.greedy_grad_copy = True  # gradients are copied as soon as they are there
        self.contiguous_param_buffer = contiguous_param_buffer
        self.contiguous_grad_buffer = contiguous_grad_buffer
        element = self.grad_sync_dtype.itemsize
        self.alignment = 128 // element
        self.default_shard_size = int(bucket_cap_mb * 2**20 / element / ranks.shards)

        self._lock = threading.RLock()
        self.device = None
        super().__init__(
            params,
            dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay),
        )
        self._begin(_options.device_of(list(self.parameters()), device))

    # ---- making ---------------------------------------------------------------------------------------

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
        self._runs = None
        for index in range(len(self.param_groups)):
            self._adopt(index)
        self._broadcast_params()

    def _adopt(self, index):
        """Takes the parameters of a group: checks them, and listens to them."""
        group = self.param_groups[index]
        for place, p in enumerate(group["params"]):
            _options.check_parameter(_name(index, place), p, self.device)
        self._complete = False
        for place, p in enumerate(group["params"]):
            self._place[p] = index, place
        self._listen()
        if self.capturable:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=self.device).clone()

    def _broadcast_params(self):
        """Gives parameters the values that they have on the first rank."""
        self._ranks.broadcast([flat(p) for p in self.parameters()])

    def _trained(self):
        """{(group, place): whether that parameter requires a gradient}."""
        return {key: p.requires_grad for p, key in self._place.items()}

    def _listen(self):
        """Hooks on all parameters, frozen ones too: they may thaw. Those of an earlier optimizer are removed."""
        for p, (index, place) in self._place.items():
            owner, handle = _hooks.get(p, (lambda: None, None))
            if owner() is self:
                continue
            if handle is not None:
                handle.remove()
            frozen = not p.requires_grad
            p.requires_grad_(True)  # torch takes hooks on such parameters alone
            try:
                handle = self._register(p, self._make_post_backward_hook(p, index, place))
            finally:
                p.requires_grad_(not frozen)
            _hooks[p] = weakref.ref(self), handle

    def _register(self, p, hook):
        if not self.contiguous_grad_buffer:
            return p.register_post_accumulate_grad_hook(hook)
        # Kernels that write into the buffer leave autograd without a gradient: only the node knows of the pass.
        with torch.enable_grad():
            node = p.expand_as(p).grad_fn.next_functions[0][0]
        self._nodes.append(node)
        return node.register_hook(hook)

    def _make_post_backward_hook(self, param, param_group_id, param_id):
        me = weakref.ref(self)

        def post_backward_hook(*unused):
            self = me()
            if self is None:
                return
            with self._lock:
                if self.greedy_grad_copy:
                    self._grad_copy(param)
                    if self.overlap_grad_sync:
                        self._try_start_bucket_grad_sync(params=[param])

        return post_backward_hook

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.device is not None:
            self._gradients.settle()
        super().add_param_group(param_group)
        if self.device is not None:
            self._adopt(len(self.param_groups) - 1)
            self._ranks.broadcast([flat(p) for p in self.param_groups[-1]["params"]])

    def __getstate__(self):
        raise TypeError(
            "DistributedFusedAdam belongs to its ranks and cannot be copied: make another one, and give it "
            "state_dict() of this one"
        )

    # ---- where parameters lie ------------------------------------------------------------------------

    def parameters(self) -> Iterator[torch.Tensor]:
        """An iterator over the parameters of all groups."""
        return itertools.chain.from_iterable(group["params"] for group in self.param_groups)

    def parameter(self, *args: Any) -> torch.Tensor:
        """The parameter of a ParameterFragment; or of two ints: the group, and the place in the group."""
        if len(args) == 1 and isinstance(args[0], ParameterFragment):
            args = args[0].param_group_id, args[0].param_id
        if len(args) != 2 or not all(isinstance(arg, int) for arg in args):
            raise TypeError(
                "parameter() takes a ParameterFragment, or two ints, not "
                f"{', '.join(type(arg).__name__ for arg in args)}"
            )
        return self.param_groups[args[0]]["params"][args[1]]

    def init_params(
        self,
        params: Iterable[torch.Tensor] | None = None,
        dtype: torch.dtype | None = None,
        grad_sync_dtype: torch.dtype | None = None,
        param_sync_dtype: torch.dtype | None = None,
    ) -> None:
        """Places parameters in buckets, in this order; those that have their place already are left out.

        Without it, the first gradient places all of them, the last ones first: as gradients come. When the last
        parameter has its place, the optimizer takes the values that all have.

        params: parameters, or one; None: all. dtype, grad_sync_dtype, param_sync_dtype: of these parameters, in
        the place of the optimizer's; dtype must be that. Every rank must call it alike.
        """
        if params is None:
            params = reversed(list(self.parameters()))
        for p in [params] if isinstance(params, torch.Tensor) else params:
            if p in self._place and "fragments" not in self.state[p]:
                group, place = self._place[p]
                self._init_param_state(
                    p,
                    group,
                    place,
                    dtype=dtype,
                    grad_sync_dtype=grad_sync_dtype,
                    param_sync_dtype=param_sync_dtype,
                )
        if all("fragments" in self.state[p] for p in self._place):
            self._allocate()

    def init_params_bucket(
        self,
        params: Iterable[torch.Tensor],
        dtype: torch.dtype | None = None,
        grad_sync_dtype: torch.dtype | None = None,
        param_sync_dtype: torch.dtype | None = None,
    ) -> None:
        """Places parameters in buckets of their own, which are reduced together when all have their gradients.

        Arguments are those of `init_params`.
        """
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        params = [p for p in params if p in self._place and "fragments" not in self.state[p]]
        with self._layout.together([self._place[p] for p in params]):
            self.init_params(
                params, dtype=dtype, grad_sync_dtype=grad_sync_dtype, param_sync_dtype=param_sync_dtype
            )

    def _init_param_state(
        self, param, param_group_id, param_id, dtype=None, grad_sync_dtype=None, param_sync_dtype=None
    ):
        dtypes = (
            dtype or self.dtype,
            grad_sync_dtype or self.grad_sync_dtype,
            param_sync_dtype or self.param_sync_dtype,
        )
        _options.check_placement(_name(param_group_id, param_id), param, self, dtypes)
        usual = dtypes[2] == self.param_sync_dtype
        self.state[param]["fragments"] = self._layout.place(
            param_group_id,
            param_id,
            param.numel(),
            dtypes,
            store_params=self.store_params or not usual,
            store_param_remainders=self.store_param_remainders and usual,
        )

    def _materialize(self):
        """Every parameter has its place, and its state is there."""
        if not self._complete:
            self.init_params()
            self._allocate()

    @torch.no_grad()
    def _allocate(self):
        """Makes the state of the buckets that have none."""
        if self._complete:
            return
        self._complete = True
        self._listen()
        _loader.load()
        self._check_strides()
        self._strides.update((p, p.stride()) for p in self._place)
        new = self._layout.close()
        parts = [None] * len(new)
        if self.contiguous_grad_buffer:
            buffers, parts = _contiguous.gradient_buffers(new, self.device)
            self._grad_buffers += buffers
        for bucket in new:
            bucket.allocate(self.device)
            if self.with_scaled_states:
                scale_states(bucket, self.device)
            store_parameters(bucket, model_shard(bucket, self.parameter, torch.float32))
            self._places.append(Places(bucket, [*map(self.parameter, bucket.fragments)]))
        self._gradients.append(
            [GradientBucket(bucket, bucket.waits_for, part) for bucket, part in zip(new, parts, strict=True)],
            self._gradient_order(),
        )

    def _check_strides(self):
        """Elements lie in buckets as they lay in memory: raises RuntimeError where they lie otherwise by now."""
        for p, strides in self._strides.items():
            if p.stride() != strides:
                raise RuntimeError(
                    f"{_name(*self._place[p])} had strides {strides} when its state was made and has {p.stride()}: "
                    "change memory formats before that, or make another optimizer and give it state_dict() of this "
                    "one from before the change"
                )

    def _gradient_order(self):
        """Numbers of the buckets as gradients come: those of the last parameters first, the same on all ranks."""
        number = {place: i for i, place in enumerate(self._place.values())}
        last = [max(number[place] for place in bucket.waits_for) for bucket in self.state["buckets"]]
        return sorted(range(len(last)), key=lambda i: (-last[i], i))

    # ---- contiguous buffers ----------------------------------------------------------------------------

    @torch.no_grad()
    def init_param_buffer(self) -> None:
        """Makes parameters views of large buffers, as contiguous_param_buffer=True does at the first step.

        Raises RuntimeError where a parameter's dtype is not that in which it is gathered.
        """
        self.contiguous_param_buffer = True
        self._materialize()
        self.param_sync()
        firsts = [(p, *self.state[p]["fragments"][:1]) for p in self._place if p.numel()]
        buckets = self.state["buckets"]
        for p, first in firsts:
            _contiguous.check_can_move(p, buckets[first.bucket_id])
        self._param_buffers = _contiguous.parameter_buffers(buckets, self.device)
        for p, first in firsts:
            _contiguous.move(p, first, _contiguous.part_of(self._param_buffers, buckets[first.bucket_id]))

    def grad_buffer_view(self, param: torch.Tensor) -> torch.Tensor:
        """The part of the contiguous gradient buffer that holds a parameter's gradient, shaped like it.

        What is written there is reduced with the parameter's bucket. Raises RuntimeError without
        contiguous_grad_buffer.
        """
        if not self.contiguous_grad_buffer:
            raise RuntimeError(
                "DistributedFusedAdam: there is no gradient buffer to view: pass contiguous_grad_buffer=True"
            )
        self._materialize()
        if not param.numel():
            return torch.empty_like(param, dtype=self.grad_sync_dtype, requires_grad=False)
        first = self.state[param]["fragments"][0]
        return _contiguous.view_of(self._gradients.buckets[first.bucket_id].buffer, first, param)

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

    @torch.no_grad()
    def grad_sync(self) -> None:
        """Every rank's shards hold the mean (or sum) of all gradients so far. Every rank must call it."""
        self._materialize()
        left = [(p, self.state[p]["fragments"]) for p in self.parameters() if p.grad is not None]
        if left:
            self._gradients.add(left)
            self._grad_norm = None
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
                ParameterBucket(self._places[i], buckets[i], shard, parts[i])
                for i, shard in zip(order, shards, strict=True)
            ]
        )
        if self.overlap_param_sync and self.distributed_size > 1:
            self._parameters.wait_when_used()
        else:
            self._parameters.finish()
        return loss

    def _update_shards(self, order, found_inf):
        """Adam on this rank's shards of these buckets; returns what is sent of each."""
        local = LocalStep(
            self.param_groups,
            self.device,
            self.parameter,
            self.adam_w_mode,
            self.state["step"],
            self._grad_scale,
            found_inf,
        )
        buckets, parts, runs = self.state["buckets"], self._param_parts(), self._current_runs()
        gradients = self._gradients.shards()
        return local.update([(buckets[i], runs[i], gradients[i], self._own(parts[i])) for i in order])

    def _count(self, found_inf):
        """Counts this step, unless found_inf says otherwise, and returns by how much."""
        counted = 1 if found_inf is None else (found_inf == 0).to(torch.int32)
        self.state["step"] += counted
        return counted

    def _current_runs(self):
        """The runs of each bucket; other ones once a parameter comes to require gradients, or no longer does."""
        trainable = [p.requires_grad for p in self.parameters()]
        if (
            self._runs is None
            or self._runs[0] != trainable
            or len(self._runs[1]) < len(self.state["buckets"])
        ):
            runs = [runs_of(b, lambda f: self.parameter(f).requires_grad) for b in self.state["buckets"]]
            self._runs = trainable, runs
        return self._runs[1]

    def _param_parts(self):
        """Each bucket's part of the contiguous parameter buffers; None where there is none."""
        return [_contiguous.part_of(self._param_buffers, bucket) for bucket in self.state["buckets"]]

    def _own(self, part):
        """This rank's shard of a bucket."""
        return None if part is None else part.chunk(self.distributed_size)[self.distributed_rank]

    # ---- checkpoints -----------------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(
        self, *, state_dict_format: int | None = None, gather_on_root: bool | None = None
    ) -> dict[str, Any] | None:
        """The optimizer's state. Every rank must call it.

        state_dict_format: 2 (None): the same dict on every rank, with each parameter's "param", "exp_avg" and
        "exp_avg_sq" whole, shaped like it, on the CPU: fits any number of ranks and any options. 1: what this
        rank keeps, as it is; gather_on_root (None: True): all ranks' on the first one, None on the others.
        """
        if state_dict_format not in (None, 1, 2):
            raise ValueError(
                f"DistributedFusedAdam: there is no state dict format {state_dict_format}: 1 or 2"
            )
        if gather_on_root is not None and state_dict_format != 1:
            raise ValueError("gather_on_root belongs to state_dict_format=1: format 2 is whole on every rank")
        self._materialize()
        self.grad_sync()
        self.param_sync()
        self._check_strides()
        state_dict = super().state_dict()
        if state_dict_format == 1:
            if gather_on_root is None or gather_on_root:
                state_dict = _checkpoint.gather_bytes(state_dict, self._ranks)
            if state_dict is not None:
                state_dict["format"] = 1
            return state_dict
        params = list(self.parameters())
        whole = _checkpoint.gather(
            self.state["buckets"],
            params,
            self.parameter,
            self._ranks,
            torch.float32 if self.with_scaled_states else self.dtype,
        )
        keys = _checkpoint.check_groups(state_dict, self.param_groups)
        state_dict["state"] = {"step": self.state["step"], **dict(zip(keys, whole, strict=True))}
        return {**_checkpoint.without_aliases(state_dict), "format": 2}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what state_dict() returned: format 2 into any number of ranks and options, format 1 as saved.

        Parameters get their values, too (format 2). Every rank must call it, and nothing is changed if one of
        these is raised:

        ValueError: the checkpoint is another optimizer's, or of other parameters. RuntimeError: format 1, saved
        with another number of ranks or other options.
        """
        form = state_dict.get("format")
        if form is None:
            form = 1 if "gathered_states" in state_dict or "buckets" in state_dict["state"] else 2
        if form not in (1, 2):
            raise ValueError(f"DistributedFusedAdam: there is no state dict format {form}: 1 or 2")
        if form == 1:
            state_dict = _checkpoint.shard_of(state_dict, self._ranks)
            _checkpoint.check_groups(state_dict, self.param_groups)
        else:
            states = _checkpoint.check_whole(state_dict, self.param_groups)
        self._materialize()
        self.grad_sync()
        self.param_sync()
        self._check_strides()
        if form == 1:
            _checkpoint.load_shard(state_dict, self.state["buckets"])
        else:
            _checkpoint.scatter(states, self.state["buckets"], list(self.parameters()), self.parameter)
        _checkpoint.load_options(state_dict["param_groups"], self.param_groups)
        step = state_dict["state"]["step"]
        if self.capturable:
            self.state["step"].copy_(torch.as_tensor(step, dtype=torch.int32, device=self.device))
        else:
            self.state["step"] = int(step)


def _name(group, place):
    return f"DistributedFusedAdam: parameter {place} of group {group}"


# ---- names that subclasses of public apex's optimizer import ------------------------------------------------


def _multi_tensor_copy(buffers_in, buffers_out, dummy_overflow_buf=None):
    copy_lists(buffers_in, buffers_out)


@contextlib.contextmanager
def _disable_pre_forward_hook(param):
    with torch._C.DisableTorchFunctionSubclass():
        yield
