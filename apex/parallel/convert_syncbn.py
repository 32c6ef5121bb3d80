"""Replacing a model's batch norms by SyncBatchNorm."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from apex.parallel.optimized_sync_batchnorm import SyncBatchNorm


def convert_syncbn_model(
    module: nn.Module, process_group: dist.ProcessGroup | None = None, channel_last: bool = False
) -> nn.Module:
    """The module with every torch.nn.BatchNorm1d, 2d, 3d and SyncBatchNorm in it replaced by apex's SyncBatchNorm.

    Children are replaced in place; use what is returned, which is another object where the module is a batch norm
    itself. Parameters and running statistics are the same objects as before, so that optimizers made earlier go on.
    A batch norm that is used in several places stays one.

    Args:
        module: torch.nn.Module.
        process_group: the ranks that share statistics; None: all.
        channel_last: see SyncBatchNorm.

    Raises:
        ValueError: a lazy batch norm that has seen no input, so that its size is unknown.
    """
    return _convert(module, process_group, channel_last, {})


def _convert(module, process_group, channel_last, known):
    if module in known:
        return known[module]
    known[module] = made = module
    if isinstance(module, _BatchNorm):
        known[module] = made = _sync_batchnorm(module, process_group, channel_last)
    for name, child in module._modules.items():
        if child is not None:
            made.add_module(name, _convert(child, process_group, channel_last, known))
    return made


def _sync_batchnorm(module, process_group, channel_last):
    if is_lazy(module.weight) or is_lazy(module.running_mean):
        raise ValueError(
            f"convert_syncbn_model: {type(module).__name__} does not know its size yet; run one batch through the "
            "model first"
        )
    made = SyncBatchNorm(
        module.num_features,
        module.eps,
        module.momentum,
        module.affine,
        module.track_running_stats,
        process_group,
        channel_last=channel_last,
        fuse_relu=getattr(module, "fuse_relu", False),
    )
    made.weight, made.bias = module.weight, module.bias
    made.running_mean, made.running_var = module.running_mean, module.running_var
    made.num_batches_tracked = module.num_batches_tracked
    made.training = module.training
    return made
