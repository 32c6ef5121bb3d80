"""Batch norm of NHWC tensors with an addition and a ReLU in the same pass, over groups of ranks."""

from apex.contrib.groupbn.batch_norm import BatchNorm2d_NHWC

__all__ = ["BatchNorm2d_NHWC"]
