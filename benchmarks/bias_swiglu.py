"""Bias and activation on a GPU, forward and backward together, beside torch's own.

usage: python benchmarks/bias_swiglu.py [--only gelu] [--without-compile] [--accuracy] [--json FILE]
       python benchmarks/bias_swiglu.py --accuracy       # without a GPU: the errors alone

Floor of gated forms: eight passes over half of the input (forward reads two halves and writes one, backward reads
three and writes two); of others five over all of it. Biases do not count.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from _measure import DEVICE, ON_GPU
from _report import Report, parse, print_errors

from apex.transformer import functional


def swiglu(x, b):
    first, second = (x if b is None else x + b).chunk(2, -1)
    return F.silu(first) * second


def geglu(x, b):
    first, second = (x if b is None else x + b).chunk(2, -1)
    return F.gelu(first, approximate="tanh") * second


def gelu(x, b):
    return F.gelu(x if b is None else x + b, approximate="tanh")


def quick_gelu(x, b):
    u = x if b is None else x + b
    return u * torch.sigmoid(1.702 * u)


def squared_relu(x, b):
    return F.relu(x if b is None else x + b).square()


OWN = {"swiglu": swiglu, "geglu": geglu, "gelu": gelu, "quick_gelu": quick_gelu, "squared_relu": squared_relu}
# name, rows, size of the output, with a bias
CASES = [
    ("swiglu", 8192, 11008, True),
    ("swiglu", 8192, 11008, False),
    ("geglu", 8192, 11008, True),
    ("gelu", 8192, 16384, True),
    ("quick_gelu", 8192, 16384, True),
    ("squared_relu", 8192, 16384, True),
    ("swiglu", 32768, 1024, True),
    ("swiglu", 1024, 1024, True),
    ("swiglu", 128, 512, True),
    ("gelu", 128, 1024, True),
]


def implementations(name, bias):
    """name -> function of (input, bias or None)"""
    found = {
        "apex": getattr(functional, f"fused_bias_{name}"),
        "torch eager": OWN[name],
        "torch.compile": torch.compile(OWN[name]),
    }
    if not bias and name in ("swiglu", "geglu"):  # Liger's take two tensors and no bias
        try:
            from liger_kernel.ops.geglu import LigerGELUMulFunction
            from liger_kernel.ops.swiglu import LigerSiLUMulFunction
        except ImportError:
            return found
        liger = {"swiglu": LigerSiLUMulFunction, "geglu": LigerGELUMulFunction}[name]
        found["Liger"] = lambda x, b: liger.apply(*(t.contiguous() for t in x.chunk(2, -1)))
    return found


def tensors(name, rows, hidden, bias, dtype):
    torch.manual_seed(0)
    columns = hidden * 2 if name.endswith("glu") else hidden
    x = torch.randn(rows, columns, device=DEVICE, dtype=dtype, requires_grad=True)
    b = torch.randn(columns, device=DEVICE, dtype=dtype, requires_grad=True) if bias else None
    return x, b, torch.randn(rows, hidden, device=DEVICE, dtype=dtype)


def step_of(function, x, b, g):
    leaves = [x] if b is None else [x, b]

    def step():
        y = function(x, b)
        return y, *torch.autograd.grad(y, leaves, g)

    return step


def accuracy(name, rows, hidden, bias, dtype):
    """Prints the largest and the root mean square error of ours and torch's against float64."""
    x, b, g = tensors(name, rows, hidden, bias, dtype)
    wide = [None if t is None else t.detach().double().requires_grad_() for t in (x, b)]
    expected = step_of(OWN[name], *wide, g.double())()
    for implementation, function in implementations(name, bias).items():
        if implementation == "torch.compile":
            continue
        title = f"{name} {rows}x{hidden} {str(dtype)[6:]} {implementation}"
        print_errors(title, ("output", "dx", "db"), step_of(function, x, b, g)(), expected)


def times(options):
    report = Report(options)
    for name, count, hidden, bias in CASES:
        label = f"{'bias ' if bias else ''}{name} {count}x{hidden}"
        if not report.wants(label):
            continue
        x, b, g = tensors(name, count, hidden, bias, torch.bfloat16)
        passes = 8 if name.endswith("glu") else 5
        for implementation, function in implementations(name, bias).items():
            report.measure(label, implementation, step_of(function, x, b, g), passes * count * hidden * 2)
    report.end()


def main():
    options = parse(argparse.ArgumentParser(description=__doc__.splitlines()[0]))
    if ON_GPU:
        times(options)
    if options.accuracy:
        for name in OWN:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                accuracy(name, 4096 if ON_GPU else 256, 4096, True, dtype)


if __name__ == "__main__":
    main()
