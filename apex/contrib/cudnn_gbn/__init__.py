"""Batch norm over groups of ranks, with the interface of public apex's on cuDNN; here it needs no cuDNN."""

from apex.contrib.cudnn_gbn.batch_norm import GroupBatchNorm2d

__all__ = ["GroupBatchNorm2d"]
