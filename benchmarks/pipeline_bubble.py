"""How long the stages of a pipeline wait, against the schedule's own arithmetic: passes that only take time.

    python benchmarks/pipeline_bubble.py --stages 2 --microbatches 8
    python benchmarks/pipeline_bubble.py --stages 4 --chunks 2
    python benchmarks/pipeline_bubble.py --device cuda --chunks 1 2     # each stage on a GPU of its own, with NCCL

Each stage is a process, on gloo. A forward pass sleeps for --forward ms, a backward pass for --backward ms, divided by
the parts of a stage, so that a step has the same work at any number of parts. On a GPU a kernel sleeps, for so many
cycles as take that time. By the arithmetic, a step of m microbatches takes (m + (stages - 1) / chunks) passes, and a
stage waits for (stages - 1) / chunks of those. A pass is a forward and a backward, by the time that they take alone, on
the slowest stage.

To reach, with 2 stages of one or two parts and 8 microbatches: a stage waits at most 1.1 times what it must.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import functools
import json
import os
import pathlib
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing
from _overlap import without_multicast
from torch import nn

from apex.transformer import parallel_state
from apex.transformer.pipeline_parallel import build_model, get_forward_backward_func, utils

SHAPE = 16, 1, 64


def sleep(seconds, device):
    """Takes its time: of this thread, or of the GPU."""
    if device.type == "cuda":
        torch.cuda._sleep(int(seconds * cycles_per_second()))
    else:
        time.sleep(seconds)


@functools.cache
def cycles_per_second(cycles=200_000_000):
    """Of the GPU's clock, once it has come to its pace."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
    end.synchronize()
    return 1e3 * cycles / begin.elapsed_time(end)


class Sleep(torch.autograd.Function):
    """The identity, which takes its time."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_seconds = backward
        sleep(forward, x.device)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        sleep(ctx.backward_seconds, grad.device)
        return grad, None, None


class Part(nn.Module):
    def __init__(self, seconds, device, *, pre_process, post_process):
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(SHAPE[-1], dtype=torch.float32, device=device))

    def set_input_tensor(self, tensors):
        self.input = tensors[0]

    def forward(self, x):
        return Sleep.apply((x if self.input is None else self.input) * self.weight, *self.seconds)


def _step(batch, model):
    return model(batch[0].expand(*SHAPE)), lambda x: (x.sum(), x.detach().sum())


def start(rank, args, store):
    """Makes the process groups. Returns this stage's device."""
    without_multicast()
    torch.set_num_threads(1)
    device = torch.device(args.device, rank) if args.device == "cuda" else torch.device("cpu")
    if args.device == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if args.device == "cuda" else "gloo", init_method=f"file://{store}", rank=rank,
        world_size=args.stages, timeout=datetime.timedelta(seconds=120),
        device_id=device if args.device == "cuda" else None,
    )  # fmt: skip
    utils.setup_microbatch_calculator(rank, None, args.microbatches, 1, 1)
    sleep(0.001, device)  # the clock is measured
    return device


def timed(work, device):
    """Seconds of `work`, from the time that all stages begin until all have ended."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    dist.barrier()
    synchronize()
    begin = time.perf_counter()
    work()
    synchronize()
    dist.barrier()
    synchronize()
    return time.perf_counter() - begin


def run(rank, args, store, found):
    """Puts the medians of a stage's work alone and of a step into `found`, for each number of parts."""
    faulthandler.dump_traceback_later(30, repeat=True)  # what hangs says where
    device = start(rank, args, store)
    for parts in args.chunks:
        parallel_state.initialize_model_parallel(1, args.stages, parts if parts > 1 else None)
        medians = [measure(work, args, device) for work in works(args, parts, device)]
        parallel_state.destroy_model_parallel()
        if rank == 0:
            found.put(medians)
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
    os._exit(0)


def works(args, parts, device):
    """A stage's work alone, and a step of the pipeline, as functions."""
    chunks = parts if parts > 1 else None
    seconds = [ms / 1000 / parts for ms in (args.forward, args.backward)]
    models = build_model(Part, False, chunks, seconds=seconds, device=device)
    schedule = get_forward_backward_func(chunks, args.stages)
    batch = [torch.ones(args.microbatches, 1, 1, dtype=torch.float32, device=device)]

    def alone():
        for _ in range(args.microbatches * parts):
            for one in seconds:
                sleep(one, device)

    def step():
        schedule(_step, batch, models, forward_only=False, tensor_shape=SHAPE)

    return alone, step


def measure(work, args, device):
    """The median of its times, after a first one."""
    times = [timed(work, device) for _ in range(args.steps + 1)][1:]
    if dist.get_rank() == 0:
        each = ", ".join(f"{1000 * seconds:.1f}" for seconds in times)
        print(f"{work.__name__}: {each} ms", flush=True)
    return statistics.median(times)


def show(args, parts, work, step):
    """Prints and returns {name: (found, by the arithmetic)} in seconds."""
    waits = (args.stages - 1) / parts * work / args.microbatches
    print(f"{args.device}, {args.stages} stages x {parts}, {args.microbatches} microbatches")
    rows = {"step": (step, work + waits), "waiting": (step - work, waits)}
    for name, (found, wanted) in rows.items():
        print(
            f"{name:8s} {1000 * found:8.1f} ms, by the arithmetic {1000 * wanted:8.1f} ({found / wanted:.3f} x)"
        )
    return rows


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1], help="parts of the model on each stage")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--forward", type=float, default=20, help="ms of a microbatch on a stage")
    parser.add_argument("--backward", type=float, default=40)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file")
    args = parser.parse_args()
    times = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (args, f"{folder}/store", times), nprocs=args.stages)
    rows = {parts: show(args, parts, *times.get()) for parts in args.chunks}
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
