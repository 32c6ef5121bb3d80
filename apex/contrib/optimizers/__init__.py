"""Optimizers whose state is sharded over the ranks of a data-parallel group, and public apex's first ones."""

from apex._legacy import absent
from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam
from apex.contrib.optimizers.distributed_fused_lamb import DistributedFusedLAMB
from apex.contrib.optimizers.fp16_optimizer import FP16_Optimizer
from apex.contrib.optimizers.fused_adam import FusedAdam
from apex.contrib.optimizers.fused_lamb import FusedLAMB

__all__ = ["DistributedFusedAdam", "DistributedFusedLAMB", "FP16_Optimizer", "FusedAdam", "FusedLAMB"]

__getattr__ = absent.attributes_of(__name__)
