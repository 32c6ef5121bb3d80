"""Batch norm of NHWC images with addition and ReLU on a GPU, forward and backward together, beside torch's ops.

usage: python benchmarks/groupbn.py [--only 56x56] [--without-compile] [--kernels] [--accuracy] [--json FILE]
       python benchmarks/groupbn.py --accuracy       # without a GPU: the errors alone

Floor, in passes over the input: the forward reads it twice and writes the output; the backward reads input and gradient
twice and writes the input's gradient. A residual is read once, and its gradient written. A ReLU's mask is a bit for
each element, written once and read twice. Where a tensor still lies in the L2 cache, a second read may cost less.
With --kernels each kernel alone, and its own floor.
"""

from __future__ import annotations

import argparse
import functools

import torch
from _measure import DEVICE, ON_GPU
from _report import Report, parse, print_errors

from apex.contrib.groupbn import BatchNorm2d_NHWC

# Layers of ResNet-50 on 224x224 images with what follows them there, and one that is small.
LAYERS = [
    ((128, 256, 56, 56), " add relu"),
    ((128, 64, 112, 112), " relu"),
    ((128, 256, 56, 56), ""),
    ((128, 512, 28, 28), " add relu"),
    ((128, 1024, 14, 14), " add relu"),
    ((128, 2048, 7, 7), " add relu"),
    ((128, 512, 7, 7), " relu"),
    ((4, 256, 14, 14), " add relu"),
]
DTYPE = torch.float16
MASK = 1 / 16  # of a pass: a bit for each element of two bytes


class TorchBlock(torch.nn.Module):
    """What the fused layer replaces."""

    def __init__(self, channels, relu):
        super().__init__()
        self.norm = torch.nn.BatchNorm2d(channels)
        self.relu = relu

    def forward(self, x, z=None):
        y = self.norm(x)
        y = y if z is None else y + z
        return torch.relu(y) if self.relu else y


def images(shape, count, dtype=DTYPE):
    """Random images in torch.channels_last."""
    torch.manual_seed(0)
    return [
        torch.randn(shape, device=DEVICE, dtype=dtype).contiguous(memory_format=torch.channels_last)
        for _ in range(count)
    ]


def layer(shape, kind, dtype=DTYPE):
    """(implementations by name, leaves, gradient)"""
    x, z, gradient = images(shape, 3, dtype)
    plain = TorchBlock(shape[1], "relu" in kind).to(DEVICE)
    modules = {
        "apex": BatchNorm2d_NHWC(shape[1], fuse_relu="relu" in kind, torch_channels_last=True).to(DEVICE),
        "torch eager": plain,
        "torch.compile": torch.compile(plain),
    }
    return modules, [t.requires_grad_() for t in ([x, z] if "add" in kind else [x])], gradient


def step_of(module, leaves, gradient):
    def step():
        y = module(*leaves)
        return y, *torch.autograd.grad(y, [*leaves, *module.parameters()], gradient)

    return step


def label_of(shape, kind=""):
    return "x".join(map(str, shape)) + kind


def measure_layers(report):
    for shape, kind in LAYERS:
        label = label_of(shape, kind)
        if not report.wants(label):
            continue
        modules, leaves, gradient = layer(shape, kind)
        passes = 8 + 2 * ("add" in kind) + 3 * MASK * ("relu" in kind)
        floor = passes * gradient.numel() * gradient.element_size()
        for name, module in modules.items():
            report.measure(label, name, step_of(module, leaves, gradient), floor)


def measure_kernels(report):
    """Each kernel alone, with addition and ReLU."""
    ops = torch.ops.apex
    for shape in dict.fromkeys(shape for shape, _ in LAYERS):
        label = f"kernel, {label_of(shape)}"
        if not report.wants(label):
            continue
        x, z, g = images(shape, 3)
        channels, bytes_of = shape[1], x.numel() * x.element_size()
        weight, bias = (torch.rand(channels, device=DEVICE) for _ in range(2))
        found = ops.welford_mean_var(x)
        mean, inv_std, count = found[:channels], (found[channels:-1] + 1e-5).rsqrt(), found[-1:]
        numbers = mean, inv_std, weight
        mask = ops.groupbn_forward(x, z, *numbers, bias, True, True)[1]
        sums = ops.reduce_bn(g, x, *numbers, False, mask)[0].chunk(2)
        for name, passes, op, arguments in (
            ("welford_mean_var", 1, ops.welford_mean_var, (x,)),
            ("groupbn_forward", 3 + MASK, ops.groupbn_forward, (x, z, *numbers, bias, True, True)),
            ("reduce_bn", 2 + MASK, ops.reduce_bn, (g, x, *numbers, False, mask)),
            ("groupbn_backward", 4 + MASK, ops.groupbn_backward, (g, x, mask, *numbers, *sums, count, True)),
        ):
            report.measure(label, f"apex {name}", functools.partial(op, *arguments), passes * bytes_of)


def accuracy(shape, kind, dtype):
    """Prints the largest and the root mean square error of ours and torch's against float64."""
    modules, leaves, gradient = layer(shape, kind, dtype)
    exact = TorchBlock(shape[1], "relu" in kind).to(DEVICE, torch.float64)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    expected = step_of(exact, wide, gradient.double())()
    names = ["output", "dx", *(["dz"] if "add" in kind else []), "dw", "db"]
    for name in ("apex", "torch eager"):
        title = f"{label_of(shape, kind)} {str(dtype)[6:]} {name}"
        print_errors(title, names, step_of(modules[name], leaves, gradient)(), expected)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", action="store_true", help="each kernel alone, too")
    options = parse(parser)
    if ON_GPU:
        report = Report(options)
        measure_layers(report)
        if options.kernels:
            measure_kernels(report)
        report.end()
    if options.accuracy:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            accuracy((8, 256, 28, 28), " add relu", dtype)


if __name__ == "__main__":
    main()
