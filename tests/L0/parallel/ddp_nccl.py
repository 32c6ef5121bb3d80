"""What each rank of the test of overlap runs, on NCCL: how long all-reduces run beside other kernels."""

from __future__ import annotations

import json
import pathlib

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from apex.parallel import DistributedDataParallel

# Products so long that a slow host keeps ahead of them: all-reduces would else run while the device waits for it.
WIDTH, LAYERS, BATCH = 4096, 8, 32768


def run(rank, ranks, folder):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found = {}
    for name, options in (
        ("beside", {"message_size": WIDTH * WIDTH}),
        ("delayed", {"delay_allreduce": True}),
    ):
        layers = [nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(LAYERS)]
        model = DistributedDataParallel(nn.Sequential(*layers).cuda(), **options)
        x = torch.randn(BATCH, WIDTH, dtype=torch.bfloat16, device="cuda")
        for _ in range(2):  # the first finds the buckets, both warm up
            model(x).square().mean().backward()
        loss = model(x).square().mean()
        torch.cuda.synchronize()
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            loss.backward()
            torch.cuda.synchronize()
        path = f"{folder}/{name}{rank}.trace.json"
        trace.export_chrome_trace(path)
        found[name] = _overlap(json.loads(pathlib.Path(path).read_text())["traceEvents"])
    pathlib.Path(folder, f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _overlap(events):
    """Of the kernels in a trace: how many all-reduces, how long they ran, and how long beside products."""
    kernels = [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "kernel"]
    sent = [(start, end) for name, start, end in kernels if "AllReduce" in name]
    # Whatever their names are, the backward pass's products take long, and copies into buckets do not.
    products = [
        (start, end) for name, start, end in kernels if "nccl" not in name.lower() and end - start > 100
    ]
    beside = sum(max(0.0, min(end, e) - max(start, s)) for start, end in sent for s, e in products)
    return {
        "messages": len(sent),
        "all_reduce_us": sum(end - start for start, end in sent),
        "products": len(products),
        "overlap_us": beside,
    }
