"""How long the stages of a pipeline wait, against the schedule's own arithmetic: passes that only take time, on CPUs.

    python benchmarks/pipeline_bubble.py --stages 2 --microbatches 8
    python benchmarks/pipeline_bubble.py --stages 4 --chunks 2

Each stage is a process, on gloo. A forward pass sleeps for --forward ms, a backward pass for --backward ms, divided by
the parts of a stage, so that a step has the same work at any number of parts. By the arithmetic, a step of m
microbatches takes (m + (stages - 1) / chunks) x (forward + backward), and a stage waits for (stages - 1) / chunks of
those.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from apex.transformer import parallel_state
from apex.transformer.pipeline_parallel import build_model, get_forward_backward_func, utils

SHAPE = 16, 1, 64


class Sleep(torch.autograd.Function):
    """The identity, which takes its time."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.backward_seconds)
        return grad, None, None


class Part(nn.Module):
    def __init__(self, seconds, *, pre_process, post_process):
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(SHAPE[-1], dtype=torch.float32, device="cpu"))

    def set_input_tensor(self, tensors):
        self.input = tensors[0]

    def forward(self, x):
        return Sleep.apply((x if self.input is None else self.input) * self.weight, *self.seconds)


def _step(batch, model):
    return model(batch[0].expand(*SHAPE)), lambda x: (x.sum(), x.detach().sum())


def run(rank, args, store, found):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.stages)
    chunks = args.chunks if args.chunks > 1 else None
    parallel_state.initialize_model_parallel(1, args.stages, chunks)
    utils.setup_microbatch_calculator(rank, None, args.microbatches, 1, 1)
    seconds = [ms / 1000 / args.chunks for ms in (args.forward, args.backward)]
    models = build_model(Part, False, chunks, seconds=seconds)
    schedule = get_forward_backward_func(chunks, args.stages)
    batch = [torch.ones(args.microbatches, 1, 1, dtype=torch.float32, device="cpu")]
    times = []
    for _ in range(args.steps + 1):
        dist.barrier()
        start = time.perf_counter()
        schedule(_step, batch, models, forward_only=False, tensor_shape=SHAPE)
        dist.barrier()
        times.append(time.perf_counter() - start)
    if rank == 0:
        found.put(times[1:])
    dist.barrier()
    os._exit(0)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=1, help="parts of the model on each stage")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--forward", type=float, default=20, help="ms of a microbatch on a stage")
    parser.add_argument("--backward", type=float, default=40)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    times = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (args, f"{folder}/store", times), nprocs=args.stages)
    pass_seconds = (args.forward + args.backward) / 1000
    waits = (args.stages - 1) / args.chunks * pass_seconds
    work = args.microbatches * pass_seconds
    step = statistics.median(times.get())
    print(f"{args.stages} stages x {args.chunks}, {args.microbatches} microbatches")
    for name, found, wanted in (("step", step, work + waits), ("waiting", step - work, waits)):
        print(
            f"{name:8s} {1000 * found:8.1f} ms, by the arithmetic {1000 * wanted:8.1f} ({found / wanted:.3f} x)"
        )


if __name__ == "__main__":
    main()
