"""Batch norm's kernels on one GPU, and SyncBatchNorm over two with NCCL, beside torch's own.

usage: python benchmarks/syncbn.py [--only channels_last] [--without-compile] [--kernels | --layers] [--json FILE]

Floors: statistics read the input once. Forward alone: two reads of the input and one write. Forward and backward
together: two reads and one write, then two reads each of input and gradient and one write. Numbers of a channel do
not count. With two GPUs or more, whole layers run on two, where a step has one all-gather and one all-reduce.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing
from _measure import wall_seconds
from _overlap import without_multicast
from _report import Report, parse

from apex.parallel import SyncBatchNorm

SHAPES = [(64, 256, 56, 56), (64, 512, 28, 28), (64, 1024, 14, 14), (64, 2048, 7, 7)]
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
DTYPES = {"fp16": torch.float16, "fp32": torch.float32}


def cases(report):
    """(label, x, gradient) for each shape, format and dtype that the report wants."""
    for shape in SHAPES:
        for format_name, format in FORMATS.items():
            for dtype_name, dtype in DTYPES.items():
                label = f"{'x'.join(map(str, shape))} {dtype_name} {format_name}"
                if report.wants(label) and (dtype_name == "fp16" or shape == SHAPES[0]):
                    torch.manual_seed(0)
                    x, g = (
                        torch.randn(shape, device="cuda", dtype=dtype).contiguous(memory_format=format)
                        for _ in range(2)
                    )
                    yield label, x, g


def measure_kernels(report):
    """Each kernel alone."""
    ops = torch.ops.apex
    for label, x, g in cases(report):
        channels, bytes_of = x.shape[1], x.numel() * x.element_size()
        weight, bias = (torch.rand(channels, device="cuda") for _ in range(2))
        found = ops.welford_mean_var(x)
        mean, inv_std = found[:channels], (found[channels:-1] + 1e-5).rsqrt()
        sums = ops.reduce_bn(g, x, mean, inv_std, weight)[0].chunk(2)
        count = found[-1:]
        steps = {
            ("statistics", "apex welford_mean_var", 1): lambda x=x: ops.welford_mean_var(x),
            ("statistics", "torch batch_norm_stats", 1): lambda x=x: torch.batch_norm_stats(x, 1e-5),
            ("statistics", "torch var_mean", 1): lambda x=x: torch.var_mean(x.float(), (0, 2, 3)),
            ("normalize", "apex batchnorm_forward", 2): lambda x=x, m=mean, r=inv_std, w=weight, b=bias: (
                ops.batchnorm_forward(x, None, m, r, w, b)
            ),
            ("normalize", "torch batch_norm_elemt", 2): lambda x=x, m=mean, r=inv_std, w=weight, b=bias: (
                torch.batch_norm_elemt(x, w, b, m, r, 1e-5)
            ),
            ("reduce", "apex reduce_bn", 2): lambda x=x, g=g, m=mean, r=inv_std, w=weight: ops.reduce_bn(
                g, x, m, r, w
            ),
            ("reduce", "torch batch_norm_backward_reduce", 2): lambda x=x, g=g, m=mean, r=inv_std, w=weight: (
                torch.batch_norm_backward_reduce(g, x, m, r, w, True, True, True)
            ),
            (
                "gradient",
                "apex batchnorm_backward",
                3,
            ): lambda x=x, g=g, m=mean, r=inv_std, w=weight, s=sums, n=count: ops.batchnorm_backward(
                g, x, m, r, w, *s, n
            ),
            (
                "gradient",
                "torch batch_norm_backward_elemt",
                3,
            ): lambda x=x, g=g, m=mean, r=inv_std, w=weight, s=sums, n=count: torch.batch_norm_backward_elemt(
                g, x, m, r, w, *s, n.int()
            ),
        }
        for (what, name, passes), step in steps.items():
            report.measure(f"{what} {label}", name, step, passes * bytes_of)


def wall_seconds_of_ranks(step, rounds=5, count=20):
    """As wall_seconds, with as many steps on every rank: each of them waits for the others."""
    times = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(count):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / count)
    return statistics.median(times[1:])


def measure_layers(report):
    """Forward and backward of whole layers; of SyncBatchNorm over all ranks, if there are several."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    wall = wall_seconds if world == 1 else wall_seconds_of_ranks
    for label, x, g in cases(report):
        makes = {"apex SyncBatchNorm": SyncBatchNorm(x.shape[1])}
        if world > 1:
            makes["torch SyncBatchNorm"] = torch.nn.SyncBatchNorm(x.shape[1])
        else:
            makes["torch BatchNorm2d"] = torch.nn.BatchNorm2d(x.shape[1])
            makes["torch.compile BatchNorm2d"] = torch.compile(torch.nn.BatchNorm2d(x.shape[1]))
        for name, module in makes.items():
            module.cuda()
            leaf = x.detach().requires_grad_()

            def step(module=module, leaf=leaf, g=g):
                y = module(leaf)
                return y, torch.autograd.grad(y, [leaf, *module.parameters()], g)

            case = f"layer, {world} GPU{'s' if world > 1 else ''}, {label}"
            report.measure(case, name, step, 8 * x.numel() * x.element_size(), wall=wall)


def _rank(rank, world, folder, options, bandwidth, rows):
    without_multicast()
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=300),
        device_id=torch.device("cuda", rank),
    )
    with contextlib.nullcontext() if rank == 0 else contextlib.redirect_stdout(io.StringIO()):
        options.json = options.json if rank == 0 else None
        measure_layers(Report(options, bandwidth, rows))
    dist.barrier()
    os._exit(0)  # threads of NCCL may still run while a group ends


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--kernels", action="store_true", help="the kernels alone, no whole layers")
    which.add_argument("--layers", action="store_true", help="whole layers over two GPUs alone")
    options = parse(parser, accuracy=False)
    report = Report(options)
    if not options.layers:
        measure_kernels(report)
        if not options.kernels:
            measure_layers(report)
        report.end()
    if not options.kernels and torch.cuda.device_count() > 1:
        with tempfile.TemporaryDirectory() as folder:
            given = (2, folder, options, report.bandwidth, report.rows)
            torch.multiprocessing.spawn(_rank, given, nprocs=2)


if __name__ == "__main__":
    main()
