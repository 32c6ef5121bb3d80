"""Dense layers on a GPU, forward and backward together, beside torch's own and their plain products.

usage: python benchmarks/dense.py [--only gelu] [--without-compile]      --only: weight gradient, host, dense, mlp

The speed of products depends on their data and on the card's heat. So every tensor is random, implementations take
turns in random order, and each case is timed twice: rested (80 ms of rest before each run) and sustained (none). Rows
are medians of GPU time in a CUDA graph, with the ratio to the plain products of the same run, and the wall time of
eager calls. Weight gradients are added to a float32 matrix; their plain product is torch's, in bfloat16. Last comes the
host's time for one call of a small product.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch
import torch.nn.functional as F

from apex.fused_dense import FusedDense, FusedDenseGeluDense, accumulate_weight_gradient, fused_dense_function
from apex.mlp import MLP

ROUNDS, REST = 15, 0.08
# name, rows, sizes, dtype
CASES = [
    ("dense-gelu-dense", 8192, (4096, 16384, 4096), torch.bfloat16),
    ("dense-gelu-dense", 2048, (1024, 4096, 1024), torch.bfloat16),
    ("dense-gelu-dense", 512, (768, 3072, 768), torch.bfloat16),
    ("mlp relu", 4096, (1024, 4096, 4096, 1024), torch.float16),
    ("dense", 4096, (4096, 4096), torch.bfloat16),
    ("dense", 128, (768, 768), torch.bfloat16),
]
# rows, inputs, outputs
WEIGHT_GRADIENTS = [(8192, 4096, 16384), (8192, 16384, 4096), (4096, 4096, 4096), (512, 768, 3072)]


def layers(name, sizes, dtype):
    """(ours, torch's) with the same values."""
    make = {"dense-gelu-dense": lambda: FusedDenseGeluDense(*sizes), "dense": lambda: FusedDense(*sizes)}
    ours = make.get(name, lambda: MLP(list(sizes)))().to("cuda", dtype)
    if name == "dense":
        return ours, lambda x: F.linear(x, ours.weight, ours.bias)
    if name == "dense-gelu-dense":
        gelu = lambda x: F.gelu(x, approximate="tanh")  # noqa: E731
        return ours, lambda x: F.linear(gelu(F.linear(x, ours.weight1, ours.bias1)), ours.weight2, ours.bias2)

    def plain(x):
        for weight, bias in zip(ours.weights, ours.biases, strict=True):
            x = F.relu(F.linear(x, weight, bias))
        return x

    return ours, plain


def products(rows, sizes, dtype):
    """The products alone: three for each layer."""
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=dtype)  # noqa: E731
    operands = [
        (make(rows, inputs), make(outputs, inputs), make(rows, outputs))
        for inputs, outputs in zip(sizes, sizes[1:], strict=False)
    ]

    def step():
        for x, w, g in operands:
            torch.mm(x, w.t())
            torch.mm(g, w)
            torch.mm(g.t(), x)

    return step


def step_of(function, parameters, x, g):
    leaves = (x, *parameters)
    return lambda: torch.autograd.grad(function(x), leaves, g)


def captured(step):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def gpu_times(replays, rest):
    """name -> median of microseconds, in turns of random order."""
    found = {name: [] for name in replays}
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for _ in range(ROUNDS):
        for name in random.sample(list(replays), len(replays)):
            if rest:
                torch.cuda.synchronize()
                time.sleep(rest)
            events[0].record()
            replays[name]()
            events[1].record()
            torch.cuda.synchronize()
            found[name].append(events[0].elapsed_time(events[1]) * 1e3)
    return {name: statistics.median(times) for name, times in found.items()}


def wall_time(step, count=20):
    for _ in range(3):
        step()
    best = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            step()
        torch.cuda.synchronize()
        best.append((time.perf_counter() - start) / count * 1e6)
    return min(best)


def host_time(step, count=50):
    """Microseconds until a call returns, with nothing before it on the device."""
    found = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            step()
        found.append((time.perf_counter() - start) / count * 1e6)
    return statistics.median(found)


def weight_gradient_steps(rows, inputs, outputs):
    """Implementations of main += g^T x, after the plain product."""
    x, g = (torch.randn(rows, size, device="cuda", dtype=torch.bfloat16) for size in (inputs, outputs))
    mains = [torch.randn(outputs, inputs, device="cuda") for _ in range(3)]
    wide = torch.ops.aten.baddbmm.dtype_out
    return {
        "products": lambda: torch.mm(g.t(), x),
        "apex": lambda: accumulate_weight_gradient(x, g, mains[0]),
        "torch mm + add": lambda: mains[1].add_(torch.mm(g.t(), x)),
        "torch baddbmm": lambda: wide(
            mains[2][None], g.t()[None], x[None], torch.float32, out=mains[2][None]
        ),
    }


def report(case, steps):
    """A row for each of the steps; the first one, "products", is what the others are compared with."""
    replays = {key: captured(step) for key, step in steps.items()}
    gpu_times(replays, 0)
    rested, sustained = gpu_times(replays, REST), gpu_times(replays, 0)
    for key, step in steps.items():
        ratios = [times[key] / times["products"] for times in (rested, sustained)]
        print(
            f"| {case} | {key} | {rested[key]:.0f} | {ratios[0]:.3f} | {sustained[key]:.0f} | {ratios[1]:.3f} | "
            f"{wall_time(step):.0f} |",
            flush=True,
        )


def report_host_times():
    """Of one small product, by torch and by apex."""
    x, w, g = (torch.randn(64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    b, main = torch.randn(64, device="cuda", dtype=torch.bfloat16), torch.randn(64, 64, device="cuda")
    print("\n| host time of one call | us |\n|---|---|")
    for name, step in {
        "torch.mm": lambda: torch.mm(x, w),
        "torch.addmm": lambda: torch.addmm(b, x, w),
        "fused_dense_function": lambda: fused_dense_function(x, w, b),
        "accumulate_weight_gradient": lambda: accumulate_weight_gradient(x, g, main),
    }.items():
        host_time(step)
        print(f"| {name} | {host_time(step):.1f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--without-compile", action="store_true")
    options = parser.parse_args()
    print("| case | implementation | rested us | ratio | sustained us | ratio | eager wall us |")
    print("|---|---|---|---|---|---|---|")
    for name, rows, sizes, dtype in CASES:
        if options.only not in name:
            continue
        torch.manual_seed(0)
        ours, plain = layers(name, sizes, dtype)
        x = torch.randn(rows, sizes[0], device="cuda", dtype=dtype, requires_grad=True)
        g = torch.randn(rows, sizes[-1], device="cuda", dtype=dtype)
        functions = {"apex": ours, "torch eager": plain}
        if not options.without_compile:
            functions["torch.compile"] = torch.compile(plain)
        parameters = list(ours.parameters())
        steps = {"products": products(rows, sizes, dtype)}
        steps |= {key: step_of(function, parameters, x, g) for key, function in functions.items()}
        report(f"{name} {rows}x{'x'.join(map(str, sizes))}", steps)
    for sizes in WEIGHT_GRADIENTS if options.only in "weight gradient" else []:
        report(f"weight gradient {'x'.join(map(str, sizes))}", weight_gradient_steps(*sizes))
    if options.only in "host":
        report_host_times()


if __name__ == "__main__":
    main()
