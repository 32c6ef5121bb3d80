"""Layer norm and RMS norm on a GPU, forward and backward together, beside torch's own.

usage: python benchmarks/norms.py [--only rms] [--without-compile] [--split] [--accuracy] [--json FILE]
       python benchmarks/norms.py --layouts [--only rms]                  # which layout of threads is fastest
       python benchmarks/norms.py --layout backward:vectors=2,blocks=2    # everything in that layout
       python benchmarks/norms.py --accuracy                              # without a GPU: the errors alone

Floor: five passes over the activations (forward reads the input and writes the output; backward reads input
and gradient and writes a gradient), eight with a residual (it is read, the sum is written, and the sum's
gradient read). Weights do not count.
"""

from __future__ import annotations

import argparse

import norm_layouts
import torch
import torch.nn.functional as F
from _measure import DEVICE, ON_GPU, copy_bandwidth
from _peers import quack_norm
from _report import Report, parse, print_errors

from apex import normalization
from apex.contrib.layer_norm import FastLayerNorm

LARGE = {
    "layer": [(8192, 4096), (4096, 12288), (32768, 768)],
    "rms": [(8192, 4096), (32768, 768)],
    "add rms": [(8192, 4096)],
}
SMALL = [(1024, 1024), (128, 1024), (64, 256)]
EPS = 1e-5


def implementations(norm, hidden, dtype):
    """name -> (function of (x, residual, weight, bias), whether its outputs are two)"""
    shape = (hidden,)

    def layer(x, r, w, b):
        return F.layer_norm(x, shape, w, b, EPS)

    def rms(x, r, w, b):
        return F.rms_norm(x, shape, w, EPS)

    def add_rms(x, r, w, b):
        total = x + r
        return F.rms_norm(total, shape, w, EPS), total

    own = {"layer": layer, "rms": rms, "add rms": add_rms}[norm]
    found = {}
    if norm == "layer":
        for make in (normalization.FusedLayerNorm, FastLayerNorm):
            module = make(hidden).to(DEVICE, dtype)
            found[f"apex {make.__name__}"] = _of_module(module)
    elif norm == "rms":
        module = normalization.FusedRMSNorm(hidden).to(DEVICE, dtype)
        found["apex FusedRMSNorm"] = _of_module(module)
    else:
        found["apex fused_add_rms_norm"] = lambda x, r, w, b: normalization.fused_add_rms_norm(x, r, w)
    found["torch eager"] = own
    found["torch.compile"] = torch.compile(own)
    if norm == "rms":
        try:
            from liger_kernel.ops.rms_norm import LigerRMSNormFunction

            found["Liger"] = lambda x, r, w, b: LigerRMSNormFunction.apply(x, w, EPS)
        except ImportError:
            pass
    return found | quack_norm(norm, EPS)


def _of_module(module):
    def run(x, r, w, b):
        if module.weight is not w:
            module.weight = w
            if hasattr(module, "bias"):
                module.bias = b
        return module(x)

    return run


def tensors(norm, rows, hidden, dtype):
    torch.manual_seed(0)
    x, r, g, gs = (torch.randn(rows, hidden, device=DEVICE, dtype=dtype) for _ in range(4))
    w = torch.nn.Parameter(torch.rand(hidden, device=DEVICE, dtype=dtype) + 0.5)
    b = torch.nn.Parameter(torch.randn(hidden, device=DEVICE, dtype=dtype))
    leaves = [x.requires_grad_(), w]
    if norm == "layer":
        leaves.append(b)
    if norm == "add rms":
        leaves.append(r.requires_grad_())
    return (x, r, w, b), leaves, (g, gs)


def step_of(function, inputs, leaves, gradients):
    def step():
        outputs = function(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return outputs, torch.autograd.grad(outputs, leaves, gradients[: len(outputs)])

    return step


def accuracy(norm, rows, hidden, dtype):
    """Prints the largest and the root mean square error of ours and torch's against float64."""
    inputs, leaves, gradients = tensors(norm, rows, hidden, dtype)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    by_input = {id(t): d for t, d in zip(inputs, wide, strict=True)}
    own = implementations(norm, hidden, torch.float64)["torch eager"]
    outputs, found = step_of(own, wide, [by_input[id(t)] for t in leaves], [g.double() for g in gradients])()
    expected = [*outputs, *found]
    names = ["output", *(["sum"] if norm == "add rms" else []), "dx", "dw", "db or dr"]
    for name, function in implementations(norm, hidden, dtype).items():
        if name == "torch.compile":
            continue
        outputs, found = step_of(function, inputs, leaves, gradients)()
        title = f"{norm} {rows}x{hidden} {str(dtype)[6:]} {name}"
        print_errors(title, names, [*outputs, *found], expected)


def accuracies():
    for norm, shapes in LARGE.items():
        rows, hidden = shapes[0]
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            accuracy(norm, rows if DEVICE == "cuda" else 256, hidden, dtype)


def times(options):
    report, dtype = Report(options), torch.bfloat16
    for norm, shapes in LARGE.items():
        for count, hidden in [*shapes, *(SMALL if norm != "add rms" else [])]:
            label = f"{norm} norm {count}x{hidden}"
            if not report.wants(label):
                continue
            inputs, leaves, gradients = tensors(norm, count, hidden, dtype)
            tensor = count * hidden * dtype.itemsize
            for name, function in implementations(norm, hidden, dtype).items():
                step = step_of(function, inputs, leaves, gradients)
                report.measure(label, name, step, (8 if norm == "add rms" else 5) * tensor)
                if options.split and "compile" not in name:

                    def forward(function=function, inputs=inputs):
                        with torch.no_grad():
                            return function(*inputs)

                    report.measure(f"{label} forward", name, forward, 2 * tensor, wall=None)
    report.end()


def sweep_layouts(only):
    bandwidth = copy_bandwidth()
    for norm, shapes in LARGE.items():
        for count, hidden in shapes:
            if only in f"{norm} norm {count}x{hidden}":
                norm_layouts.sweep(norm, count, hidden, bandwidth)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--split", action="store_true", help="also the forward alone (two passes)")
    parser.add_argument("--layout", action="append", default=[], type=norm_layouts.parse, help="see above")
    parser.add_argument("--layouts", action="store_true", help="only try layouts")
    options = parse(parser)
    if options.layouts:
        sweep_layouts(options.only)
        return
    for direction, layout in options.layout:
        norm_layouts.ask(direction, layout)
    if ON_GPU:
        times(options)
    if options.accuracy:
        accuracies()


if __name__ == "__main__":
    main()
