"""Data parallel training with sharded optimizer state: one iteration, its memory, and the host's share of a step.

usage: torchrun --nproc-per-node 2 benchmarks/distributed_optimizers.py [--layers 24] [--width 2048] [--rows 4096]
       python benchmarks/distributed_optimizers.py                  # one process
       --device cpu                                                 # on gloo

A stack of bfloat16 linear layers, float32 optimizer state. Beside DistributedFusedAdam: torch's
DistributedDataParallel with ZeroRedundancyOptimizer, and FSDP2 that keeps parameters whole between passes, which is
ZeRO-2 as well.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from apex.contrib.optimizers import DistributedFusedAdam

ADAM = dict(lr=1e-4, weight_decay=0.1)
HALF = torch.bfloat16


def stack(arguments, dtype=HALF):
    torch.manual_seed(0)
    layers = [nn.Linear(arguments.width, arguments.width, dtype=dtype) for _ in range(arguments.layers)]
    return nn.Sequential(*layers).to(arguments.device)


def sharded(**options):
    def make(arguments):
        model = stack(arguments)
        options_of_all = dict(grad_sync_dtype=HALF, param_sync_dtype=HALF, bucket_cap_mb=64, **ADAM)
        return model, DistributedFusedAdam(model.parameters(), **{**options_of_all, **options})

    return make


def torch_zero(arguments):
    model = nn.parallel.DistributedDataParallel(stack(arguments), gradient_as_bucket_view=True)
    fused = dict(fused=True) if arguments.device == "cuda" else {}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **fused, **ADAM)
    return model, optimizer


def torch_fsdp(arguments):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = stack(arguments, torch.float32)
    for module in (*model, model):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(HALF, HALF), reshard_after_forward=False)
    return model, torch.optim.AdamW(model.parameters(), fused=arguments.device == "cuda", **ADAM)


CASES = {
    "apex": sharded(),
    "apex, parameters overlap": sharded(overlap_param_sync=True),
    "apex, contiguous": sharded(
        contiguous_param_buffer=True, contiguous_grad_buffer=True, overlap_param_sync=True
    ),
    "apex, remainders": sharded(store_params=False, store_param_remainders=True),
    "torch DDP + ZeroRedundancyOptimizer (bfloat16 state)": torch_zero,
    "torch FSDP2 + fused AdamW": torch_fsdp,
}


def measure(make, arguments):
    """Milliseconds of an iteration, of its step on the host, and GiB at most."""
    on_gpu = arguments.device == "cuda"
    gc.collect()  # the case before: its hooks and buckets refer to each other
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model, optimizer = make(arguments)
    x = torch.randn(arguments.rows, arguments.width, device=arguments.device, dtype=HALF)
    whole, host = [], []
    for _ in range(arguments.repeats + 3):
        synchronize()
        dist.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        before = time.perf_counter()
        optimizer.step()
        host.append(time.perf_counter() - before)
        synchronize()
        whole.append(time.perf_counter() - begin)
    median = [1e3 * statistics.median(times[3:]) for times in (whole, host)]
    return (*median, torch.cuda.max_memory_allocated() / 2**30 if on_gpu else float("nan"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", type=pathlib.Path, help="write all figures to this file")
    arguments = parser.parse_args()
    backend = "nccl" if arguments.device == "cuda" else "gloo"
    if arguments.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    first = dist.get_rank() == 0
    found = {}
    if first:
        print(
            f"{dist.get_world_size()} ranks, {arguments.layers * arguments.width * (arguments.width + 1):,} parameters"
        )
        print(f"{'':54}{'iteration ms':>14}{'step, host ms':>15}{'GiB':>8}")
    for name, make in CASES.items():
        if arguments.only in name:
            found[name] = measure(make, arguments)
            if first:
                print(
                    f"{name:54}{found[name][0]:14.2f}{found[name][1]:15.2f}{found[name][2]:8.2f}", flush=True
                )
    if first and arguments.json:
        arguments.json.write_text(json.dumps({"device": arguments.device, "cases": found}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
