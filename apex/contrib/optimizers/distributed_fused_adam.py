"""DistributedFusedAdam: Adam whose state is sharded over data-parallel ranks (ZeRO-2)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from apex.contrib.optimizers import _contiguous, _options, _pending
from apex.contrib.optimizers._buckets import Layout, ParameterFragment, StateBucket
from apex.contrib.optimizers._flat import copy_lists, flat
from apex.contrib.optimizers._gradients import GradientBucket, Gradients
from apex.contrib.optimizers._listening import Listening
from apex.contrib.optimizers._local_step import LocalStep, runs_of
from apex.contrib.optimizers._parameters import ParameterBucket, Parameters
from apex.contrib.optimizers._placement import Placement, name_of
from apex.contrib.optimizers._ranks import Ranks
from apex.contrib.optimizers._saving import Saving
from apex.contrib.optimizers._scaling import ScaledGradients
from apex.optimizers._amp_c import OverflowFlag
from apex.optimizers._arguments import check_arguments, evaluate

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

__all__ = ["DistributedFusedAdam"]


class DistributedFusedAdam(Placement, Listening, ScaledGradients, Saving, torch.optim.Optimizer):
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

        self._take(Ranks(process_group, distributed_process_group, redundant_process_group))
        self.adam_w_mode, self.amsgrad = adam_w_mode, amsgrad
        self.average_grad_sync = average_grad_sync
        self.overlap_grad_sync, self.overlap_param_sync = overlap_grad_sync, overlap_param_sync
        self.greedy_grad_copy = True  # gradients are copied as soon as they are there
        self.contiguous_param_buffer = contiguous_param_buffer
        self.contiguous_grad_buffer = contiguous_grad_buffer
        element = self.grad_sync_dtype.itemsize
        self.alignment = 128 // element
        self.default_shard_size = int(bucket_cap_mb * 2**20 / element / self._ranks.shards)

        self._lock = threading.RLock()
        self.device = None
        super().__init__(
            params,
            dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay),
        )
        self._begin(_options.device_of(list(self.parameters()), device))

    # ---- making ---------------------------------------------------------------------------------------

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
        self._runs = None
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

    def _broadcast_params(self):
        """Gives parameters the values that they have on the first rank."""
        self._ranks.broadcast([flat(p) for p in self.parameters()])

    def _trained(self):
        """{(group, place): whether that parameter requires a gradient}."""
        return {key: p.requires_grad for p, key in self._place.items()}

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


# ---- names that subclasses of public apex's optimizer import ------------------------------------------------


def _multi_tensor_copy(buffers_in, buffers_out, dummy_overflow_buf=None):
    copy_lists(buffers_in, buffers_out)


@contextlib.contextmanager
def _disable_pre_forward_hook(param):
    with torch._C.DisableTorchFunctionSubclass():
        yield
