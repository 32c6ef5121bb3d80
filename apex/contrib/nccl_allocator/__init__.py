"""Memory that NCCL registers for its collectives."""

from apex.contrib.nccl_allocator.nccl_allocator import create_nccl_mem_pool, init, nccl_mem

__all__ = ["create_nccl_mem_pool", "init", "nccl_mem"]
