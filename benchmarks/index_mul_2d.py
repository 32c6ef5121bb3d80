"""index_mul_2d on a GPU, forward and backward together, beside torch's own ops.

usage: python benchmarks/index_mul_2d.py [--skip compile]

Floor: the forward reads the factor and writes the product; the backward reads gradient and factor and writes the
factor's gradient: five passes over rows, three over the entries (read twice, their gradient written).
"""

from __future__ import annotations

import argparse

import torch
from _measure import Row, attempt, copy_bandwidth, graph_seconds, print_table, wall_seconds

import apex
from apex.contrib.index_mul_2d import index_mul_2d

CASES = [(20000, 1000000, 64), (20000, 1000000, 256), (1000, 20000, 64)]  # entries, rows, features


def torch_product(in1, in2, index):
    return in1[index] * in2


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--skip", default="-", help="implementations whose name contains this are left out")
    arguments = parser.parse_args()
    bandwidth, rows = copy_bandwidth(), []
    for entries, count, features in CASES:
        for dtype in (torch.float32, torch.float16):
            torch._dynamo.reset()
            torch.manual_seed(0)
            in1 = torch.randn(entries, features, device="cuda", dtype=dtype).requires_grad_()
            in2 = torch.randn(count, features, device="cuda", dtype=dtype).requires_grad_()
            index, g = torch.randint(0, entries, (count,), device="cuda"), torch.randn_like(in2)
            for name, function in {
                "apex": index_mul_2d,
                "torch eager": torch_product,
                "torch.compile": torch.compile(torch_product),
            }.items():
                if arguments.skip in name:
                    continue

                def step(function=function, inputs=(in1, in2), index=index, g=g):
                    return torch.autograd.grad(function(*inputs, index), inputs, g)

                label = f"index_mul_2d {entries} {count}x{features} {str(dtype)[6:]}"
                floor = (5 * count + 3 * entries) * features * dtype.itemsize
                graph = attempt(graph_seconds, step)
                rows.append(Row(label, name, graph, attempt(wall_seconds, step), floor))
    print_table(rows, bandwidth)
    print("served by", sorted(set(apex.served().items())))


if __name__ == "__main__":
    main()
