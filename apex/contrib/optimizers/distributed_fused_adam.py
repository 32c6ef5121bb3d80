"""DistributedFusedAdam: Adam whose state is sharded over data-parallel ranks (ZeRO-2)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from apex.contrib.optimizers import _options
from apex.contrib.optimizers._flat import copy_lists
from apex.contrib.optimizers._local_step import LocalStep, runs_of
from apex.contrib.optimizers._ranks import Ranks
from apex.contrib.optimizers._sharded import ShardedOptimizer
from apex.optimizers._arguments import check_arguments

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

__all__ = ["DistributedFusedAdam"]


class DistributedFusedAdam(ShardedOptimizer):
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
        nccl_ub: the contiguous buffers lie in memory that is registered with NCCL (apex.contrib.nccl_allocator), so
            that its collectives need no copies; needs contiguous_grad_buffer, GPUs and NCCL.
        capturable: learning rate and step count lie on the device, and nothing waits for the host, so that a
            step can be captured in a CUDA graph and replayed.

    Attributes:
        state: "step", and "buckets": what this rank keeps.

    Raises:
        RuntimeError: torch.distributed is not initialized; groups that make no grid; options that contradict
            each other; amsgrad.
        ValueError: numbers out of bounds; dtypes that are not supported; parameters on several devices.
        TypeError: a parameter of another dtype, one that is not dense, or a wrapper (DTensor, float8 tensor).
        NotImplementedError: with_scaled_states with capturable.

    Sources: arXiv:1412.6980, arXiv:1711.05101, arXiv:1910.02054; interface and checkpoints of public apex.
    """

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
        self.contiguous_grad_buffer = contiguous_grad_buffer
        _options.check_options(self)

        ranks = Ranks(process_group, distributed_process_group, redundant_process_group)
        self.adam_w_mode, self.amsgrad = adam_w_mode, amsgrad
        self.average_grad_sync = average_grad_sync
        self.overlap_grad_sync, self.overlap_param_sync = overlap_grad_sync, overlap_param_sync
        self.contiguous_param_buffer = contiguous_param_buffer
        self.default_shard_size = int(bucket_cap_mb * 2**20 / self.grad_sync_dtype.itemsize / ranks.shards)
        self._runs = None
        defaults = dict(
            lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay
        )
        self._make(params, defaults, ranks, device)
        if nccl_ub:
            _options.check_user_buffers(self.device, self.distributed_process_group)

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


# ---- names that subclasses of public apex's optimizer import ------------------------------------------------


def _multi_tensor_copy(buffers_in, buffers_out, dummy_overflow_buf=None):
    copy_lists(buffers_in, buffers_out)


@contextlib.contextmanager
def _disable_pre_forward_hook(param):
    with torch._C.DisableTorchFunctionSubclass():
        yield
