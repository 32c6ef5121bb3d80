"""DistributedFusedLAMB: LAMB whose state is sharded over data-parallel ranks (ZeRO-2)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import OptState
from torch.distributed import get_process_group_ranks

from apex._bits import from_e5m2
from apex.contrib.optimizers._lamb_ranks import lamb_ranks
from apex.contrib.optimizers._local_lamb import Fragments, LocalLamb, copy_of
from apex.contrib.optimizers._sharded import ShardedOptimizer
from apex.optimizers._arguments import check_arguments

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

__all__ = ["DistributedFusedLAMB", "get_process_group_ranks"]


class DistributedFusedLAMB(ShardedOptimizer):
    """LAMB with gradients and state sharded over data-parallel ranks (ZeRO-2), in the place of FusedLAMB.

        torch.distributed.init_process_group("nccl")             # or "gloo", on CPUs
        optimizer = DistributedFusedLAMB(model.parameters(), lr=1e-3, weight_decay=0.01, max_grad_norm=1.0)
        for x, y in batches:
            optimizer.zero_grad()
            loss(model(x), y).backward()                         # reduce-scatters gradients beside it
            optimizer.complete_reductions()
            optimizer.step()                                     # updates a shard, all-gathers parameters

    Parameters become the first rank's when it is made, gradients their mean over ranks. Each rank keeps a shard of the
    gradients, of float32 parameters and of both averages; norms of parameters and updates are over all ranks. Gradients
    travel, and parameters come back, in each parameter's own dtype. A step whose gradients have no finite norm changes
    nothing, on any rank. Learning rate, step count and that flag stay on the device: nothing waits for the host.

    Args:
        params: parameters (float32, float16, bfloat16, mixed at will, dense, on one device), or dicts that define
            groups.
        lr, bias_correction, grad_averaging, betas, eps, weight_decay, adam_w_mode, use_nvlamb: as in
            apex.optimizers.FusedLAMB.
        max_grad_norm: all gradients are scaled down together to this norm; 0: never.
        step_supports_amp_scaling: torch.amp.GradScaler hands itself to step().
        overlap_reductions: reduce gradients beside the backward pass, as they come.
        dwu_group_size: so many ranks, which follow each other, shard the state; such groups hold the same. 0: the GPUs
            of a host, if that divides the ranks, else all.
        dwu_num_blocks, dwu_num_chunks: gradients are reduced, and parameters gathered, in as many parts as their
            product.
        dwu_num_rs_pg, dwu_num_ar_pg, dwu_num_ag_pg: process groups that take turns to reduce within a group, over
            groups, and to gather (0: those that reduce).
        e5m2_allgather: parameters are gathered as floats of one byte, which is what the model gets of them.
        clip_after_ar: clip the mean of all gradients by its norm; otherwise each rank clips its own by theirs, before
            the reduction, which then does not overlap the backward pass.
        full_ar: reductions give every rank all sums, rather than its shard.
        set_param_views_to_flat_buffer: parameters become views of large buffers, which are gathered without a copy.
        skip_allgather: step() leaves the model as it is; param_sync(), or the next reduction, gathers parameters.
        param_order: {parameter: number}: the order in which they are placed; None: the last ones first.
        nccl_allgather_channels: sets NCCL_MAX_NCHANNELS, if it is above 0.
        verbose: print the process groups.
        fused_norm, fuse_scale: change nothing: the norm is one launch over the buckets, scales are part of other work.

    Attributes:
        state: "step", an int32 tensor, and "buckets": what this rank keeps.

    Raises:
        RuntimeError: torch.distributed is not initialized; a group size that does not divide the ranks; parameters that
            are not the same on all ranks.
        ValueError: numbers out of bounds; parameters on several devices.
        TypeError: a parameter of another dtype, one that is not dense, or a wrapper (DTensor, float8 tensor).

    Sources: arXiv:1904.00962, arXiv:1910.02054; interface of public apex.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        adam_w_mode: bool = True,
        use_nvlamb: bool = False,
        step_supports_amp_scaling: bool = True,
        overlap_reductions: bool = True,
        dwu_group_size: int = 0,
        dwu_num_blocks: int = 4,
        dwu_num_chunks: int = 4,
        dwu_num_rs_pg: int = 1,
        dwu_num_ar_pg: int = 4,
        dwu_num_ag_pg: int = 0,
        fused_norm: bool = False,
        e5m2_allgather: bool = False,
        verbose: bool = False,
        clip_after_ar: bool = True,
        full_ar: bool = False,
        set_param_views_to_flat_buffer: bool = False,
        skip_allgather: bool = False,
        fuse_scale: bool = False,
        param_order: dict[torch.Tensor, int] | None = None,
        nccl_allgather_channels: int = 0,
    ) -> None:
        check_arguments(
            "DistributedFusedLAMB", lr=lr, betas=betas, eps=eps, weight_decay=weight_decay,
            max_grad_norm=max_grad_norm, dwu_group_size=dwu_group_size, dwu_num_ag_pg=dwu_num_ag_pg,
        )  # fmt: skip
        _check_counts(
            dwu_num_blocks=dwu_num_blocks, dwu_num_chunks=dwu_num_chunks, dwu_num_rs_pg=dwu_num_rs_pg,
            dwu_num_ar_pg=dwu_num_ar_pg,
        )  # fmt: skip
        self.adam_w_mode, self.use_nvlamb = adam_w_mode, use_nvlamb
        self.clip_after_ar, self.e5m2_allgather, self.skip_allgather = (
            clip_after_ar,
            e5m2_allgather,
            skip_allgather,
        )
        if e5m2_allgather and set_param_views_to_flat_buffer:
            raise RuntimeError(
                "DistributedFusedLAMB: parameters cannot be views of the bytes that e5m2_allgather gathers: leave out "
                "one of e5m2_allgather and set_param_views_to_flat_buffer"
            )
        self._step_supports_amp_scaling = step_supports_amp_scaling
        self._overlap_reductions, self._param_order = overlap_reductions, param_order
        self._is_accumulation_step = self._last_step = False
        self._global_scale: float | torch.Tensor | None = None
        self._local_norm: torch.Tensor | None = None
        if nccl_allgather_channels > 0:
            os.environ["NCCL_MAX_NCHANNELS"] = str(nccl_allgather_channels)
        ranks = lamb_ranks(dwu_group_size, dwu_num_rs_pg, dwu_num_ar_pg, dwu_num_ag_pg, full_ar, verbose)
        self._keep_in_full(dwu_num_blocks * dwu_num_chunks, set_param_views_to_flat_buffer)
        defaults = dict(
            lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay,
            grad_averaging=grad_averaging, max_grad_norm=max_grad_norm,
        )  # fmt: skip
        params = list(params)
        self.default_shard_size = _shard_size(params, dwu_num_blocks * dwu_num_chunks * ranks.shards)
        self._make(params, defaults, ranks, None)
        self._choose_overlap()

    def _keep_in_full(self, parts, views):
        """What `_make` reads: state in float32, scalars on the device."""
        self.dtype, self.grad_sync_dtype, self.param_sync_dtype = torch.float32, torch.float16, torch.float32
        self.store_params, self.store_param_remainders, self.with_scaled_states = True, False, False
        self.capturable = self.average_grad_sync = True
        self.overlap_grad_sync = self.overlap_param_sync = self.contiguous_grad_buffer = False
        self.contiguous_param_buffer = views
        self.pipeline_size = parts
        self._unpack = _from_bytes if self.e5m2_allgather else None
        self._fragments = None
        self._copies = None

    def _init_param_state(
        self, param, param_group_id, param_id, dtype=None, grad_sync_dtype=None, param_sync_dtype=None
    ):
        own = torch.uint8 if self.e5m2_allgather else param.dtype
        super()._init_param_state(
            param, param_group_id, param_id, dtype, grad_sync_dtype or param.dtype, param_sync_dtype or own
        )

    def init_params(
        self,
        params: Iterable[torch.Tensor] | None = None,
        dtype: torch.dtype | None = None,
        grad_sync_dtype: torch.dtype | None = None,
        param_sync_dtype: torch.dtype | None = None,
    ) -> None:
        """As the base's; None: all parameters, in the order that param_order gives."""
        if params is None and self._param_order is not None:
            params = sorted(self.parameters(), key=self._param_order.__getitem__)
        super().init_params(params, dtype, grad_sync_dtype, param_sync_dtype)

    # ---- what public apex's scripts call -----------------------------------------------------------------

    def set_is_accumulation_step(self, is_accumulation_step: bool) -> None:
        """True: gradients of passes from here on accumulate in `p.grad`, on this rank, until it is False again."""
        self._is_accumulation_step = bool(is_accumulation_step)
        self._choose_overlap()

    def set_last_step(self, last_step: bool) -> None:
        """True: nothing is reduced beside the backward pass."""
        self._last_step = bool(last_step)
        self._choose_overlap()

    def _choose_overlap(self):
        reduces = not self._is_accumulation_step
        self.greedy_grad_copy = reduces
        self.overlap_grad_sync = (
            reduces and self._overlap_reductions and self.clip_after_ar and not self._last_step
        )

    def set_global_scale(self, global_scale: float | torch.Tensor | None) -> None:
        """step() divides gradients by this: a number, or a tensor of one element. None: by a GradScaler's scale if it
        is given one, else by nothing."""
        self._global_scale = global_scale

    @property
    def global_scale(self) -> float | torch.Tensor | None:
        """What set_global_scale() was given."""
        return self._global_scale

    @torch.no_grad()
    def complete_reductions(self) -> None:
        """Every rank's shards hold the mean of all gradients, whose norm is known. Every rank must call it; step()
        does what is left of it."""
        self.grad_norm()

    @property
    def L2_grad_norm(self) -> torch.Tensor | None:
        """The norm of the gradients as they came (scaled), a float32 tensor of one element: of their mean, or, without
        clip_after_ar, of this rank's before they were clipped. None before complete_reductions()."""
        return self._grad_norm if self.clip_after_ar else self._local_norm

    @property
    def _lr(self):
        """The learning rate of all groups, which scripts for public apex assign as a tensor."""
        return self.param_groups[0]["lr"]

    @_lr.setter
    def _lr(self, lr):
        for group in self.param_groups:
            group["lr"] = lr

    def _lazy_init_stage1(self):
        """Scripts for public apex call it before the first backward pass."""

    def _lazy_init_stage2(self):
        """Scripts for public apex call it after the first backward pass."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=set_to_none)
        self._local_norm = None

    # ---- the step ----------------------------------------------------------------------------------------

    def _scale(self):
        """The scale of the gradients, on the device."""
        scale = self._global_scale
        if isinstance(scale, torch.Tensor):
            return scale.detach().to(self.device, torch.float32).reshape(1)
        return torch.full((1,), 1.0 if scale is None else scale, dtype=torch.float32, device=self.device)

    def _before_reduction(self):
        """Without clip_after_ar: clips what this rank contributes by its own norm."""
        limit = self.defaults["max_grad_norm"]
        if self.clip_after_ar:
            return
        local = self._gradients.locals()
        if not local:
            return
        self._local_norm = norm = self._square_sum(local).sqrt_()
        if limit > 0:
            factor = (limit * self._scale().view([]) / (norm + 1e-6)).clamp(max=1.0)
            factor = torch.where(torch.isfinite(norm), factor, torch.ones_like(factor))  # so that all see it
            torch._foreach_mul_(local, factor)

    def _found_inf(self, grad_scaler):
        """Says whether the norm of all gradients is not finite, and notes what the step multiplies them by."""
        norm = self.grad_norm()
        enabled = grad_scaler is not None and grad_scaler.is_enabled()
        stage = grad_scaler._per_optimizer_states[id(self)] if enabled else None
        if enabled and stage["stage"] is not OptState.READY and not self._unscaled:
            raise RuntimeError(
                "GradScaler.unscale_(optimizer) does not reach the gradients of DistributedFusedLAMB, which lie in "
                "buckets: leave it out, step() unscales; or call optimizer.unscale_grads(grad_scaler=scaler)"
            )
        inv_scale = self._grad_scale.reshape(1)
        if not self._unscaled:
            by_scaler = enabled and self._global_scale is None
            inv_scale = inv_scale / (grad_scaler._scale.to(self.device) if by_scaler else self._scale())
        self._inv_scale = inv_scale
        found_inf = torch.isfinite(norm).logical_not_().float().reshape(1)
        if enabled:
            stage["found_inf_per_device"] = {self.device: found_inf}
        return found_inf

    def _update_shards(self, order, found_inf):
        buckets = self.state["buckets"]
        if self._copies is None or len(self._copies) < len(buckets):
            targets = [self._own(part) for part in self._param_parts()]
            self._copies = [copy_of(bucket, target) for bucket, target in zip(buckets, targets, strict=True)]
        limit = self.defaults["max_grad_norm"] if self.clip_after_ar else 0.0
        norm = self._grad_norm.reshape(1) * self._inv_scale
        local = LocalLamb(
            self, self._current_fragments(), self._inv_scale, norm, float(limit or 0.0), found_inf
        )
        sent = local.update(buckets, self._gradients.shards(), self._copies)
        return [sent[i] for i in order]

    def _current_fragments(self):
        """Other ones once a parameter comes to require gradients, or no longer does, or buckets are added."""
        trained = [p.requires_grad for p in self.parameters()]
        buckets = self.state["buckets"]
        if self._fragments is None or self._fragments[:2] != (trained, len(buckets)):
            numbers = {place: number for number, place in enumerate(self._place.values())}
            found = Fragments(buckets, numbers, lambda f: self.parameter(f).requires_grad, self.device)
            self._fragments = trained, len(buckets), found
        return self._fragments[2]

    def init_param_buffer(self) -> None:
        super().init_param_buffer()
        self._copies = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "fp32_p" in state_dict:
            raise ValueError(
                "DistributedFusedLAMB: this is a shard of public apex's flat buffers, whose order only the model that "
                "wrote it knows: load the model's weights, and begin the averages anew"
            )
        super().load_state_dict(state_dict)
        self._copies = None


def _from_bytes(whole):
    return from_e5m2(whole, torch.float16)


def _check_counts(**counts):
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"DistributedFusedLAMB: {name} must be positive: {count}")


def _shard_size(params, parts):
    """Elements of a shard where all parameters lie in `parts` shards."""
    groups = params if params and isinstance(params[0], dict) else [dict(params=params)]
    count = 0
    for group in groups:
        group["params"] = (
            [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        )
        of_group = [p[1] if isinstance(p, tuple) else p for p in group["params"]]
        count += sum(p.numel() for p in of_group if isinstance(p, torch.Tensor))
    return max(-(-count // parts), 1)
