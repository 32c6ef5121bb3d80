"""index_mul_2d on a GPU, forward and backward together, beside torch's own ops.

usage: python benchmarks/index_mul_2d.py [--only float16] [--without-compile] [--accuracy] [--json FILE]
       python benchmarks/index_mul_2d.py --accuracy       # without a GPU: the errors alone

Floor: the forward reads the factor and writes the product; the backward reads gradient and factor and writes the
factor's gradient: five passes over rows, three over the entries (read twice, their gradient written).
"""

from __future__ import annotations

import argparse

import torch
from _measure import DEVICE, ON_GPU
from _report import Report, parse, print_errors

from apex.contrib.index_mul_2d import index_mul_2d

CASES = [(20000, 1000000, 64), (20000, 1000000, 256), (1000, 20000, 64)]  # entries, rows, features


def torch_product(in1, in2, index):
    return in1[index] * in2


def implementations():
    """name -> function of (entries, rows, index of an entry for each row)"""
    return {
        "apex": index_mul_2d,
        "torch eager": torch_product,
        "torch.compile": torch.compile(torch_product),
    }


def tensors(entries, count, features, dtype):
    torch.manual_seed(0)
    in1 = torch.randn(entries, features, device=DEVICE, dtype=dtype).requires_grad_()
    in2 = torch.randn(count, features, device=DEVICE, dtype=dtype).requires_grad_()
    return (in1, in2), torch.randint(0, entries, (count,), device=DEVICE), torch.randn_like(in2)


def step_of(function, inputs, index, gradient):
    def step():
        product = function(*inputs, index)
        return product, *torch.autograd.grad(product, inputs, gradient)

    return step


def accuracy(entries, count, features, dtype):
    """Prints the largest and the root mean square error of ours and torch's against float64."""
    inputs, index, gradient = tensors(entries, count, features, dtype)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    expected = step_of(torch_product, wide, index, gradient.double())()
    for name in ("apex", "torch eager"):
        found = step_of(implementations()[name], inputs, index, gradient)()
        title = f"{entries} {count}x{features} {str(dtype)[6:]} {name}"
        print_errors(title, ("product", "gradient of entries", "of rows"), found, expected)


def times(options):
    report = Report(options)
    for entries, count, features in CASES:
        for dtype in (torch.float32, torch.float16):
            label = f"index_mul_2d {entries} {count}x{features} {str(dtype)[6:]}"
            if not report.wants(label):
                continue
            inputs, index, gradient = tensors(entries, count, features, dtype)
            floor = (5 * count + 3 * entries) * features * dtype.itemsize
            for name, function in implementations().items():
                report.measure(label, name, step_of(function, inputs, index, gradient), floor)
    report.end()


def main():
    options = parse(argparse.ArgumentParser(description=__doc__.splitlines()[0]))
    if ON_GPU:
        times(options)
    if options.accuracy:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            accuracy(*CASES[-1], dtype)


if __name__ == "__main__":
    main()
