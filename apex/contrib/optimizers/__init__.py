"""Optimizers that shard their state over the ranks of a data-parallel group."""

from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam

__all__ = ["DistributedFusedAdam"]
