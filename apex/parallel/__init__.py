"""Data parallel training with the interface of public apex."""

import torch

from apex.parallel._failures import failing_together
from apex.parallel.convert_syncbn import convert_syncbn_model
from apex.parallel.distributed import DistributedDataParallel, Reducer
from apex.parallel.optimized_sync_batchnorm import SyncBatchNorm
from apex.parallel.process_groups import create_syncbn_process_group

if torch.distributed.is_available():
    from torch.distributed import ReduceOp
else:
    ReduceOp = None

__all__ = [
    "DistributedDataParallel",
    "ReduceOp",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
    "failing_together",
]
