"""Adam with its state sharded over the ranks of a data-parallel group, and public apex's FP16_Optimizer."""

from apex._legacy import absent
from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam
from apex.contrib.optimizers.fp16_optimizer import FP16_Optimizer

__all__ = ["DistributedFusedAdam", "FP16_Optimizer"]

__getattr__ = absent.attributes_of(__name__)
