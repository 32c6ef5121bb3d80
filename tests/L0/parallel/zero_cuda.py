"""What each rank of the GPU tests of test_distributed_fused_adam.py runs, on NCCL."""

from __future__ import annotations

import json
import pathlib

import torch
import torch.distributed as dist
import zero_common
import zero_faults
from torch import nn
from zero_common import SMALL, Oracle, agree, backward, clones, equal, make, parameters

from apex.contrib import nccl_allocator

BF16 = torch.bfloat16
FAULTS = (
    "idle",
    "skipped",
    "frozen_on_some_ranks",
    "dropped_on_some_ranks",
    "raises",
    "raises_and_goes_on_alone",
)


def start(rank, ranks, folder):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)


def run(rank, ranks, folder):
    """Parity over NCCL, with everything that overlaps; ranks in trouble; and that reductions run beside the pass."""
    start(rank, ranks, folder)
    for options in (
        dict(SMALL),
        dict(SMALL, overlap_param_sync=True, pipeline_size=1),
        dict(SMALL, contiguous_param_buffer=True, contiguous_grad_buffer=True),
        dict(SMALL, param_sync_dtype=BF16, store_params=False, store_param_remainders=True),
    ):
        half = "store_param_remainders" in options
        params = parameters(BF16 if half else torch.float32, device="cuda")
        optimizer, oracle = make(params, **options), Oracle(params)
        for seed in range(3):
            optimizer.zero_grad()
            backward(params, seed)
            norm = optimizer.clip_grad_norm(1.0)
            optimizer.step()
            agree(norm, oracle.step(seed, clip=1.0), 1e-3)
        optimizer.param_sync()
        oracle.check(3e-2 if half else 1e-5)
    zero_common.DEVICE = "cuda"
    for name in FAULTS:
        zero_faults.CASES[name](None)
    pathlib.Path(folder, f"rank{rank}.json").write_text(json.dumps(_overlap()))
    dist.destroy_process_group()


def run_user_buffers(rank, ranks, folder):
    """Parity over NCCL with buffers that are registered with it."""
    nccl_allocator.init()
    start(rank, ranks, folder)
    params = parameters(device="cuda")
    options = dict(SMALL, nccl_ub=True, contiguous_grad_buffer=True, contiguous_param_buffer=True)
    optimizer, oracle = make(params, **options), Oracle(params)
    for seed in range(3):
        optimizer.zero_grad()
        backward(params, seed)
        optimizer.step()
        oracle.step(seed)
    oracle.check()
    dist.destroy_process_group()


def _overlap(width=4096, layers=8, rows=8192):
    """Microseconds of reduce-scatters in a backward pass, and how many of them beside other kernels."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=BF16) for _ in range(layers))).cuda()
    optimizer = make(model.parameters(), grad_sync_dtype=BF16, param_sync_dtype=BF16, bucket_cap_mb=32)
    x = torch.randn(rows, width, dtype=BF16, device="cuda")
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    loss = model(x).square().mean()
    torch.cuda.synchronize()
    dist.barrier()
    with torch.profiler.profile() as trace:
        loss.backward()
        torch.cuda.synchronize()
    kernels = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    sent = [e.time_range for e in kernels if "ReduceScatter" in e.name]
    others = [
        e.time_range for e in kernels if "nccl" not in e.name.lower() and e.time_range.elapsed_us() > 100
    ]
    beside = sum(max(0, min(a.end, b.end) - max(a.start, b.start)) for a in sent for b in others)
    return dict(messages=len(sent), reduce_us=sum(t.elapsed_us() for t in sent), beside_us=beside)


def captured():
    """Three replays of a captured step, with clip, over a channels-last weight; and three steps without a graph."""
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)).cuda()
    x = x.to(memory_format=torch.channels_last)
    found = []
    for capture in (False, True):
        torch.manual_seed(0)
        net = nn.Conv2d(3, 16, 3).cuda().to(memory_format=torch.channels_last)
        optimizer = make(net.parameters(), capturable=True)

        def step(net=net, optimizer=optimizer):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.clip_grad_norm(0.1)
            optimizer.step()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        if capture:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            step = graph.replay
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        assert net.weight.is_contiguous(memory_format=torch.channels_last)
        assert int(optimizer.state["step"]) == 6
        found.append(clones(net.parameters()))
    equal(*found)
