"""Scaled softmax of attention scores on a GPU, causal, masked and plain, forward and backward, beside torch's own.

usage: python benchmarks/softmax.py [--only causal] [--without-compile] [--split] [--accuracy] [--json FILE]
       python benchmarks/softmax.py --accuracy       # without a GPU: the errors alone

Floor: five passes over the scores (the forward reads and writes them; the backward reads output and gradient and
writes a gradient). Causal scores are half masked, and that half is written without being read: 3.5 passes. Masks,
of a byte for all heads, do not count.
"""

from __future__ import annotations

import argparse

import torch
from _measure import DEVICE, ON_GPU
from _peers import quack_softmax
from _report import Report, parse, print_errors

from apex.transformer.functional import fused_softmax

# kind -> (batch, heads, queries, keys)
LARGE = {
    "causal": [(8, 16, 2048, 2048), (2, 32, 4096, 4096), (8, 16, 2047, 2047), (32, 16, 1024, 1024)],
    "masked": [(8, 16, 2048, 2048), (32, 16, 512, 512)],
    "plain": [(8, 16, 2048, 2048), (1, 8, 512, 65536), (64, 16, 256, 257)],
}
SMALL = {
    "causal": [(1, 4, 512, 512), (1, 8, 128, 128)],
    "masked": [(1, 8, 128, 128)],
    "plain": [(1, 1, 1024, 1024), (1, 1, 128, 1024)],
}
SCALE = 0.125
PASSES = {"causal": (1.5, 3.5), "masked": (2, 5), "plain": (2, 5)}  # forward, and with the backward


def implementations(kind, shape):
    """name -> function of (scores, mask)"""
    later = torch.ones(*shape[2:], dtype=torch.bool, device=DEVICE).triu(1) if kind == "causal" else None

    def by_torch(x, mask):
        x = x * SCALE
        mask = later if kind == "causal" else mask
        return torch.softmax(x if mask is None else x.masked_fill(mask, -torch.inf), -1)

    ours = {
        "causal": lambda x, mask: fused_softmax.scaled_upper_triang_masked_softmax(x, None, SCALE),
        "masked": lambda x, mask: fused_softmax.scaled_masked_softmax(x, mask, SCALE),
        "plain": lambda x, mask: fused_softmax.ScaledSoftmax.apply(x, SCALE),
    }
    found = {"apex": ours[kind], "torch eager": by_torch, "torch.compile": torch.compile(by_torch)}
    if kind == "plain":
        found["torch softmax alone"] = lambda x, mask: torch.softmax(x, -1)
        try:
            from liger_kernel.transformers.functional import liger_softmax

            found["Liger softmax alone"] = lambda x, mask: liger_softmax(x)
        except ImportError:
            pass
        found |= quack_softmax()
    return found


def tensors(kind, shape, dtype):
    torch.manual_seed(0)
    x, g = (torch.randn(shape, device=DEVICE, dtype=dtype) for _ in range(2))
    mask = torch.rand(shape[0], 1, *shape[2:], device=DEVICE) < 0.2 if kind == "masked" else None
    return x.requires_grad_(), mask, g


def step_of(function, x, mask, gradient):
    def step():
        y = function(x, mask)
        return y, torch.autograd.grad(y, x, gradient)[0]

    return step


def accuracy(kind, shape, dtype):
    """Prints the largest and the root mean square error of ours and torch's against float64."""
    x, mask, gradient = tensors(kind, shape, dtype)
    every = implementations(kind, shape)
    wide = x.detach().double().requires_grad_()
    expected = step_of(every["torch eager"], wide, mask, gradient.double())()
    for name in ("apex", "torch eager"):
        title = f"{kind} {'x'.join(map(str, shape))} {str(dtype)[6:]} {name}"
        print_errors(title, ("output", "dx"), step_of(every[name], x, mask, gradient)(), expected)


def times(options):
    report, dtype = Report(options), torch.bfloat16
    for kind in LARGE:
        forward_passes, passes = PASSES[kind]
        for shape in [*LARGE[kind], *SMALL[kind]]:
            label = f"{kind} softmax {'x'.join(map(str, shape))}"
            if not report.wants(label):
                continue
            x, mask, gradient = tensors(kind, shape, dtype)
            tensor = x.numel() * x.element_size()
            for name, function in implementations(kind, shape).items():
                report.measure(label, name, step_of(function, x, mask, gradient), passes * tensor)
                if options.split and "compile" not in name:

                    def forward(function=function, x=x, mask=mask):
                        with torch.no_grad():
                            return function(x, mask)

                    report.measure(f"{label} forward", name, forward, forward_passes * tensor, wall=None)
            del x, mask, gradient
    report.end()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--split", action="store_true", help="also the forward alone")
    options = parse(parser)
    if ON_GPU:
        times(options)
    if options.accuracy:
        for kind in LARGE:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                accuracy(kind, (2, 4, 1024, 1024) if ON_GPU else (1, 2, 512, 512), dtype)


if __name__ == "__main__":
    main()
