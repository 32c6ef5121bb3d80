"""Group norm and SiLU on a GPU, forward and backward together, beside torch's own.

usage: python benchmarks/group_norm.py [--only 64x64] [--without-compile] [--dtype float16] [--contiguous] [--plain]
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
from _measure import DEVICE, ON_GPU
from _report import Report, parse, print_errors

from apex._loader import library
from apex.contrib.group_norm import GroupNorm

GROUPS, EPS = 32, 1e-5
# batch, channels, height and width
CASES = [
    (16, 320, 64), (16, 640, 32), (16, 1280, 16), (16, 640, 64), (16, 2560, 16), (8, 2560, 32),
    (2, 320, 64), (2, 640, 32), (2, 1280, 16),
]  # fmt: skip


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
        title = f"{batch}x{channels}x{side}x{side} {str(dtype)[6:]} {name}"
        print_errors(title, ("output", "dx", "dw", "db"), step_of(found[name], inputs, gradient)(), expected)


def accuracies(contiguous, silu):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for case in ((8, 320, 64), (8, 1280, 16)) if DEVICE == "cuda" else ((1, 320, 32), (1, 1280, 8)):
            accuracy(*case, dtype, contiguous, silu)


def ask_for_launches(count):
    """1: in one launch wherever it can be, 2: in two, 0: as the library chooses."""
    library.load().c.apex_set_group_norm_launches(ctypes.c_int32(count))


def times(options, silu):
    report, dtype = Report(options), getattr(torch, options.dtype)
    for batch, channels, side in CASES:
        label = f"group norm {batch}x{channels}x{side}x{side}"
        if not report.wants(label):
            continue
        inputs, gradient = tensors(batch, channels, side, dtype, options.contiguous)
        tensor = inputs[0].numel() * inputs[0].element_size()
        for name, function in implementations(channels, dtype, silu).items():
            for launches in (0, 1, 2) if options.launches and name == "apex" else (0,):
                ask_for_launches(launches)
                named = f"{name}, {launches} launch{'es' * (launches > 1)}" if launches else name
                report.measure(label, named, step_of(function, inputs, gradient), 5 * tensor)
                if options.split and "compile" not in name:

                    def forward(function=function, inputs=inputs):
                        with torch.no_grad():
                            return function(*inputs)

                    report.measure(f"{label} forward", named, forward, 2 * tensor, wall=None)
            ask_for_launches(0)
    report.end()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--contiguous", action="store_true", help="channels first")
    parser.add_argument("--plain", action="store_true", help="without SiLU")
    parser.add_argument("--split", action="store_true", help="also the forward alone (two passes)")
    parser.add_argument("--launches", action="store_true", help="also ours in one launch, and in two")
    options = parse(parser)
    silu = not options.plain
    if ON_GPU:
        times(options, silu)
    if options.accuracy:
        accuracies(options.contiguous, silu)


if __name__ == "__main__":
    main()
