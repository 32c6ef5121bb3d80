"""The function of public apex's _apex_nccl_allocator."""

from __future__ import annotations

import functools
import os

import torch

from apex._loader import installed, library
from apex._loader.errors import NoDriverError

__all__ = ["get_nccl_allocator"]


def _require_gpu():
    if not torch.cuda.is_available():
        raise NoDriverError("NCCL allocates on GPUs, and torch has none here")


@functools.cache
def _allocator():
    path = os.fspath(installed.library())
    return torch.cuda.memory.CUDAPluggableAllocator(path, "apex_nccl_allocate", "apex_nccl_free")


def get_nccl_allocator():
    """torch's allocator whose memory is NCCL's (ncclMemAlloc), for torch.cuda.MemPool.

    Raises NoDriverError without NCCL 2.19 beside torch's libraries, or without a GPU in torch.
    """
    _require_gpu()
    status = library.load().c.apex_open_nccl()
    if status:
        library.load().check(status)
    return _allocator().allocator()
