"""Data parallel training with the interface of public apex."""

from apex.parallel.distributed import DistributedDataParallel, Reducer
from apex.parallel.process_groups import create_syncbn_process_group

__all__ = ["DistributedDataParallel", "Reducer", "create_syncbn_process_group"]
