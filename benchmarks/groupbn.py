"""Batch norm of NHWC images with addition and ReLU on a GPU, forward and backward together, beside torch's ops.

usage: python benchmarks/groupbn.py [--only 56x56] [--skip compile] [--kernels] [--json FILE]

Floor, in passes over the input: the forward reads it twice and writes the output; the backward reads input and gradient
twice and writes the input's gradient. A residual is read once, and its gradient written. A ReLU's mask is a bit for
each element, written once and read twice. Where a tensor still lies in the L2 cache, a second read may cost less.
With --kernels each kernel alone, and its own floor.
"""

from __future__ import annotations

import argparse

import torch
from _measure import Row, attempt, copy_bandwidth, graph_seconds, print_table, wall_seconds, write_json

import apex
from apex.contrib.groupbn import BatchNorm2d_NHWC

# The layers of ResNet-50 on 224x224 images, and one that is small.
SHAPES = [
    (128, 64, 112, 112),
    (128, 64, 56, 56),
    (128, 256, 56, 56),
    (128, 128, 28, 28),
    (128, 512, 28, 28),
    (128, 256, 14, 14),
    (128, 1024, 14, 14),
    (128, 512, 7, 7),
    (128, 2048, 7, 7),
    (4, 256, 14, 14),
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


def images(shape, count):
    """Random images in torch.channels_last."""
    torch.manual_seed(0)
    return [
        torch.randn(shape, device="cuda", dtype=DTYPE).contiguous(memory_format=torch.channels_last)
        for _ in range(count)
    ]


def chosen(only):
    """Shapes whose label contains `only`, and their labels."""
    for shape in SHAPES:
        label = "x".join(map(str, shape))
        if only in label:
            yield label, shape


def layers(only, skip):
    """Rows of whole layers."""
    for label, shape in chosen(only):
        for mode in ("", " relu", " add relu"):
            relu, add = "relu" in mode, "add" in mode
            torch._dynamo.reset()
            x, z, gradient = images(shape, 3)
            leaves = [t.requires_grad_() for t in ([x, z] if add else [x])]
            plain = TorchBlock(shape[1], relu).cuda()
            passes = 8 + 2 * add + 3 * MASK * relu
            for name, module in {
                "apex": BatchNorm2d_NHWC(shape[1], fuse_relu=relu, torch_channels_last=True).cuda(),
                "torch eager": plain,
                "torch.compile": torch.compile(plain),
            }.items():
                if skip in name:
                    continue

                def step(module=module, leaves=leaves, gradient=gradient):
                    y = module(*leaves)
                    return y, torch.autograd.grad(y, [*leaves, *module.parameters()], gradient)

                yield Row(
                    f"{label}{mode}", name, attempt(graph_seconds, step), attempt(wall_seconds, step),
                    int(passes * x.numel() * x.element_size()),
                )  # fmt: skip


def kernels(only):
    """Rows of each kernel alone, with addition and ReLU."""
    ops = torch.ops.apex
    for label, shape in chosen(only):
        x, z, g = images(shape, 3)
        channels, bytes_of = shape[1], x.numel() * x.element_size()
        weight, bias = (torch.rand(channels, device="cuda") for _ in range(2))
        found = ops.welford_mean_var(x)
        mean, inv_std = found[:channels], (found[channels:-1] + 1e-5).rsqrt()
        mask = ops.groupbn_forward(x, z, mean, inv_std, weight, bias, True, True)[1]
        sums = ops.reduce_bn(g, x, mean, inv_std, weight, False, mask)[0].chunk(2)
        steps = {
            ("welford_mean_var", 1): lambda x=x: ops.welford_mean_var(x),
            ("groupbn_forward", 3 + MASK): lambda x=x, z=z, m=mean, r=inv_std, w=weight, b=bias: (
                ops.groupbn_forward(x, z, m, r, w, b, True, True)
            ),
            ("reduce_bn", 2 + MASK): lambda x=x, g=g, m=mean, r=inv_std, w=weight, k=mask: ops.reduce_bn(
                g, x, m, r, w, False, k
            ),
            (
                "groupbn_backward",
                4 + MASK,
            ): lambda x=x, g=g, m=mean, r=inv_std, w=weight, k=mask, s=sums, n=found[-1:]: (
                ops.groupbn_backward(g, x, k, m, r, w, *s, n, True)
            ),
        }
        for (name, passes), step in steps.items():
            yield Row(
                f"kernel, {label}", f"apex {name}", attempt(graph_seconds, step), attempt(wall_seconds, step),
                int(passes * bytes_of),
            )  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="shapes whose label contains this")
    parser.add_argument("--skip", default="-", help="implementations whose name contains this are left out")
    parser.add_argument("--kernels", action="store_true", help="each kernel alone, too")
    parser.add_argument("--json", help="write all figures to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and torch.cuda.is_available() is False")
    bandwidth = copy_bandwidth()
    rows = list(layers(arguments.only, arguments.skip))
    if arguments.kernels:
        rows += kernels(arguments.only)
    print_table(rows, bandwidth)
    if arguments.json:
        write_json(arguments.json, rows, bandwidth)
    print("served by", sorted(set(apex.served().items())))


if __name__ == "__main__":
    main()
