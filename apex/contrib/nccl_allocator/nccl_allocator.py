"""Memory that NCCL registers for its collectives (user buffers), with public apex's names.

    pool = create_nccl_mem_pool()
    with nccl_mem(pool, group=group):
        buffer = torch.empty(size, device="cuda")      # collectives of `group` on it need no copies

What is allocated within stays in that memory until it is freed; it may be used as any other tensor.
"""

from __future__ import annotations

import inspect
import os
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from apex._legacy import _apex_nccl_allocator
from apex._loader.errors import ArgumentError

__all__ = ["create_nccl_mem_pool", "init", "nccl_mem"]


def get_func_args(func: Any) -> list[str]:
    """The names of a function's parameters."""
    return list(inspect.signature(func).parameters)


def create_nccl_mem_pool(symmetric: bool | None = None) -> torch.cuda.MemPool:
    """A pool of torch's whose memory is NCCL's.

    symmetric: registered as symmetric memory; None: as this torch does by itself.

    Raises:
        NoDriverError: there is no NCCL 2.19, or no GPU.
        ArgumentError: symmetric is given, and this torch has no such pools.
    """
    allocator = _apex_nccl_allocator.get_nccl_allocator()
    if symmetric is None:
        return torch.cuda.MemPool(allocator)
    known = [name for name in ("symmetric", "symm_mem") if name in get_func_args(torch.cuda.MemPool)]
    if not known:
        raise ArgumentError(
            f"create_nccl_mem_pool: torch {torch.__version__} has no symmetric pools: leave symmetric out"
        )
    return torch.cuda.MemPool(allocator, **{known[0]: symmetric})


def init() -> None:
    """Sets what user buffers need of torch, before the process group is made.

    A variable that is set stays. NCCL_NVLS_ENABLE is left alone: NCCL's own default uses NVLink's multicast where it
    can; public apex forces it.
    """
    os.environ.setdefault("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "0")


class nccl_mem:
    """While it lasts, torch allocates from `pool`; at its end the pool's memory is registered with the group's NCCL.

    Args:
        pool: of create_nccl_mem_pool.
        enabled: False: nothing of that is done.
        device: the GPU, as torch.device takes it; None: the current one.
        group: the process group; None: the default one.

    Raises:
        ArgumentError: device is no GPU.
        NoDriverError: torch has no GPU.
    """

    def __init__(
        self,
        pool: torch.cuda.MemPool,
        enabled: bool = True,
        device: torch.device | int | str | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.pool = pool
        self.device: torch.device | None = None
        self.group: dist.ProcessGroup | None = None
        self.mem_context: Any = nullcontext()
        if not enabled:
            return
        if isinstance(device, (torch.device, str)) and torch.device(device).type != "cuda":
            raise ArgumentError(f"nccl_mem: device must be a GPU, not {device}")
        _apex_nccl_allocator._require_gpu()
        if device is None:
            device = torch.cuda.current_device()
        self.device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        self.group = dist.group.WORLD if group is None else group
        self.mem_context = torch.cuda.use_mem_pool(self.pool, self.device)

    def __enter__(self) -> None:
        self.mem_context.__enter__()
        # What is registered may grow: memory of an earlier use is registered anew at the end.
        self._tell("deregister_mem_pool")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._tell("register_mem_pool")
        finally:
            self.mem_context.__exit__(kind, error, trace)

    def _tell(self, method):
        """Calls the group's NCCL. It refuses pools that it does not know, or knows already, and groups without
        communicators; backends other than NCCL have no such methods. Then collectives copy, as of any memory."""
        if self.group is None:
            return
        with suppress(RuntimeError, AttributeError):
            getattr(self.group._get_backend(self.device), method)(self.pool)
