"""A loss scale on which the ranks of a model agree."""

from __future__ import annotations

import torch
import torch.distributed as dist

from apex.transformer import _collectives as collectives
from apex.transformer import parallel_state
from apex.transformer.tensor_parallel.utils import current_device


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler; what is infinite or NaN in the gradients of any rank that holds a part of the model makes
    all of them skip the step, and lower the scale.

    Its ranks call unscale_, step and update alike; one without gradients does, too. It is for the kind of GPU that
    there is, or the CPU where there is none.

    Args:
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as of torch.amp.GradScaler.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def _check_scale_growth_tracker(self, funcname):
        """Stages without a loss never call scale(), which makes the scale; theirs begins alike."""
        if self._scale is None and not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            self._lazy_init_scale_growth_tracker(current_device())
        return super()._check_scale_growth_tracker(funcname)

    def _unscale_grads_(self, optimizer, *args):
        """{device: 1 where a gradient of any rank is not finite}: all that torch does goes by this."""
        if getattr(optimizer, "_custom_amp_unscale_grads", False):
            found = optimizer.unscale_grads(*args)
        else:
            found = super()._unscale_grads_(optimizer, *args)
        whole = torch.zeros_like(self._scale)
        for flag in found.values():
            whole = torch.maximum(whole, flag.to(whole.device, whole.dtype).view(()))
        group = parallel_state.get_model_parallel_group()
        collectives.all_reduce(whole, group, "whether gradients are finite", dist.ReduceOp.MAX)
        return {device: whole.to(device) for device in found or [whole.device]}
