"""SyncBatchNorm under its other name in public apex: here the kernels need no fallback in Python."""

from apex.parallel.optimized_sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
