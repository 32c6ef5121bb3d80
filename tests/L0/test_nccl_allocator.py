"""apex.contrib.nccl_allocator: what is set, what is refused by name, and memory that NCCL gives and registers."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from apex._legacy import _apex_nccl_allocator
from apex._loader.errors import ArgumentError, NoDriverError
from apex.contrib.nccl_allocator import create_nccl_mem_pool, init, nccl_allocator, nccl_mem

HOOK, NVLS = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "NCCL_NVLS_ENABLE"


def test_init_keeps_what_is_set(monkeypatch):
    """And sets no variable of NVLink's multicast."""
    for name in (HOOK, NVLS):
        monkeypatch.delenv(name, raising=False)
    init()
    assert os.environ[HOOK] == "0" and NVLS not in os.environ
    monkeypatch.setenv(HOOK, "1")
    monkeypatch.setenv(NVLS, "0")
    init()
    assert (os.environ[HOOK], os.environ[NVLS]) == ("1", "0")


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    entered = [lambda device=device: nccl_mem(None, device=device) for device in (None, 0, "cuda")]
    for call in (create_nccl_mem_pool, _apex_nccl_allocator.get_nccl_allocator, *entered):
        with pytest.raises(NoDriverError, match="NCCL allocates on GPUs, and torch has none here"):
            call()
    with pytest.raises(ArgumentError, match="device must be a GPU, not cpu"):
        nccl_mem(None, device="cpu")
    with nccl_mem(None, enabled=False):
        assert torch.empty(1, dtype=torch.float32, device="cpu").device.type == "cpu"


def test_symmetric_pools(monkeypatch):
    """By whichever name this torch has for them; said where it has none. None leaves torch's own default."""
    monkeypatch.setattr(_apex_nccl_allocator, "get_nccl_allocator", lambda: "an allocator")
    made = []

    class Symmetric:
        def __init__(self, allocator, symmetric=False):
            made.append((allocator, symmetric))

    class SymmMem:
        def __init__(self, allocator, symm_mem=False):
            made.append((allocator, symm_mem))

    class Neither:
        def __init__(self, allocator):
            made.append((allocator,))

    for kind in (Symmetric, SymmMem):
        monkeypatch.setattr(torch.cuda, "MemPool", kind)
        create_nccl_mem_pool()
        create_nccl_mem_pool(symmetric=True)
    assert made == [("an allocator", False), ("an allocator", True)] * 2
    monkeypatch.setattr(torch.cuda, "MemPool", Neither)
    create_nccl_mem_pool()
    with pytest.raises(ArgumentError, match="has no symmetric pools"):
        create_nccl_mem_pool(symmetric=False)
    assert made[4:] == [("an allocator",)]
    assert nccl_allocator.get_func_args(Neither) == ["allocator"]


def test_a_pool_is_registered_at_the_end(monkeypatch):
    """With the group's NCCL, anew if it had been; also after an exception. What NCCL refuses is no failure."""
    told = []

    class Backend:
        def register_mem_pool(self, pool):
            told.append(("register", pool))

        def deregister_mem_pool(self, pool):
            told.append(("deregister", pool))
            raise RuntimeError("this pool is not known")

    class Context:
        def __enter__(self):
            told.append("in")

        def __exit__(self, *_):
            told.append("out")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    group = SimpleNamespace(_get_backend=lambda device: told.append(device) or Backend())
    others = SimpleNamespace(_get_backend=lambda device: "of another kind, such as gloo's")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool, device: Context())
    for device in (1, "cuda:1", torch.device("cuda", 1)):
        told.clear()
        with pytest.raises(KeyError), nccl_mem("a pool", device=device, group=group):
            raise KeyError
        where = torch.device("cuda", 1)
        assert told == ["in", where, ("deregister", "a pool"), where, ("register", "a pool"), "out"]
    told.clear()
    with nccl_mem("a pool", device=1, group=others):
        pass
    assert told == ["in", "out"]


@pytest.mark.gpu
def test_memory_on_a_gpu(tmp_path):
    """Tensors of the pool work in collectives, and go back."""
    os.environ.setdefault(NVLS, "0")
    init()
    torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{tmp_path}/store",
        rank=0,
        world_size=1,
        device_id=torch.device("cuda", 0),
    )
    try:
        pool = create_nccl_mem_pool()
        with nccl_mem(pool):
            x = torch.ones(1 << 20, dtype=torch.float32, device="cuda")
        dist.all_reduce(x)
        assert x.eq(1).all()
        del x
        torch.cuda.synchronize()
        del pool
    finally:
        dist.destroy_process_group()
