"""Group norm and SiLU on a GPU, forward and backward together, beside torch's own.

usage: python benchmarks/group_norm.py [--only 64x64] [--skip compile] [--dtype float16] [--contiguous] [--plain]
                                       [--split] [--launches] [--accuracy] [--json FILE]
       python benchmarks/group_norm.py --accuracy       # without a GPU: the errors alone

Shapes as in a diffusion model's blocks: 32 groups, channels last. Floor: five passes over the activations (the forward
reads the input and writes the output; the backward reads input and gradient and writes a gradient). Weights do not
count.
"""

from __future__ import annotations

import argparse
import ctypes

import torch
import torch.nn.functional as F
from _measure import (
    Row,
    attempt,
    copy_bandwidth,
    graph_seconds,
    max_and_rms,
    print_table,
    wall_seconds,
    write_json,
)

import apex
from apex._loader import library
from apex.contrib.group_norm import GroupNorm

GROUPS, EPS = 32, 1e-5
# channels, height and width; each with the largest and the smallest batch
IMAGES = [(320, 64), (640, 64), (320, 32), (640, 32), (1280, 32), (640, 16), (1280, 16), (2560, 16)]
CASES = [(batch, *image) for batch in (16, 2) for image in IMAGES] + [(8, 2560, 32)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def implementations(channels, dtype, silu):
    """name -> function of (x, weight, bias)"""

    def own(x, w, b):
        y = F.group_norm(x, GROUPS, w, b, EPS)
        return F.silu(y) if silu else y

    module = GroupNorm(GROUPS, channels, EPS, act="silu" if silu else None).to(DEVICE, dtype)

    def ours(x, w, b):
        if module.weight is not w:
            module.weight, module.bias = w, b
        return module(x)

    return {"apex": ours, "torch eager": own, "torch.compile": torch.compile(own)}


def tensors(batch, channels, side, dtype, contiguous):
    torch.manual_seed(0)
    layout = torch.contiguous_format if contiguous else torch.channels_last
    shape = (batch, channels, side, side)
    x, g = (torch.randn(shape, device=DEVICE, dtype=dtype).to(memory_format=layout) for _ in range(2))
    w = torch.nn.Parameter(torch.rand(channels, device=DEVICE, dtype=dtype) + 0.5)
    b = torch.nn.Parameter(torch.randn(channels, device=DEVICE, dtype=dtype))
    return (x.requires_grad_(), w, b), g


def step_of(function, inputs, gradient):
    def step():
        output = function(*inputs)
        return output, *torch.autograd.grad(output, inputs, gradient)

    return step


def accuracy(batch, channels, side, dtype, contiguous, silu):
    """Prints the largest and the root mean square error of ours and torch's against float64."""
    inputs, gradient = tensors(batch, channels, side, dtype, contiguous)
    found = implementations(channels, dtype, silu)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    expected = step_of(found["torch eager"], wide, gradient.double())()
    for name in ("apex", "torch eager"):
        errors = [
            (a.double() - e).abs()
            for a, e in zip(step_of(found[name], inputs, gradient)(), expected, strict=True)
        ]
        text = ", ".join(
            f"{n} {max_and_rms(e)}" for n, e in zip(("output", "dx", "dw", "db"), errors, strict=True)
        )
        print(f"  {batch}x{channels}x{side}x{side} {str(dtype)[6:]} {name}: max / rms error of {text}")


def accuracies(contiguous, silu):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for case in ((8, 320, 64), (8, 1280, 16)) if DEVICE == "cuda" else ((1, 320, 32), (1, 1280, 8)):
            accuracy(*case, dtype, contiguous, silu)


def ask_for_launches(count):
    """1: in one launch wherever it can be, 2: in two, 0: as the library chooses."""
    library.load().c.apex_set_group_norm_launches(ctypes.c_int32(count))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--skip", default="-", help="implementations whose name contains this are left out")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--contiguous", action="store_true", help="channels first")
    parser.add_argument("--plain", action="store_true", help="without SiLU")
    parser.add_argument("--split", action="store_true", help="also the forward alone (two passes)")
    parser.add_argument("--launches", action="store_true", help="also ours in one launch, and in two")
    parser.add_argument("--accuracy", action="store_true", help="errors against float64 as well")
    parser.add_argument("--json", help="write all figures to this file")
    arguments = parser.parse_args()
    silu = not arguments.plain
    if DEVICE == "cpu":
        if not arguments.accuracy:
            parser.error("times need a GPU; without one there is --accuracy")
        accuracies(arguments.contiguous, silu)
        return
    bandwidth, rows, dtype = copy_bandwidth(), [], getattr(torch, arguments.dtype)
    for batch, channels, side in CASES:
        label = f"group norm {batch}x{channels}x{side}x{side}"
        if arguments.only not in label:
            continue
        torch._dynamo.reset()
        inputs, gradient = tensors(batch, channels, side, dtype, arguments.contiguous)
        tensor = inputs[0].numel() * inputs[0].element_size()
        for name, function in implementations(channels, dtype, silu).items():
            if arguments.skip in name:
                continue
            for launches in (0, 1, 2) if arguments.launches and name == "apex" else (0,):
                ask_for_launches(launches)
                step = step_of(function, inputs, gradient)
                graph = attempt(graph_seconds, step)
                named = f"{name}, {launches} launch{'es' * (launches > 1)}" if launches else name
                rows.append(Row(label, named, graph, attempt(wall_seconds, step), 5 * tensor))
                if arguments.split and "compile" not in name:

                    def forward(function=function, inputs=inputs):
                        with torch.no_grad():
                            return function(*inputs)

                    rows.append(
                        Row(f"{label} forward", named, attempt(graph_seconds, forward), None, 2 * tensor)
                    )
            ask_for_launches(0)
    print_table(rows, bandwidth)
    if arguments.accuracy:
        accuracies(arguments.contiguous, silu)
    print("served by", sorted(set(apex.served().items())))
    if arguments.json:
        write_json(arguments.json, rows, bandwidth)


if __name__ == "__main__":
    main()
