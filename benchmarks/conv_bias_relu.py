"""Convolutions with what follows them on a GPU, forward and backward together, beside torch's own.

usage: python benchmarks/conv_bias_relu.py [--only bottleneck] [--without-compile]

Channels last, random data, implementations by turns, rested and sustained, as benchmarks/dense.py has it.
`convolutions` is the same without bias, scale, addition and ReLU: what no fusion in passes of their own gets below. The
last column is what comes to that. `cuDNN fused` takes cuDNN's convolution with bias and ReLU in the forward.
"""

from __future__ import annotations

import argparse
import copy

import torch
import torch.nn.functional as F
from dense import REST, captured, gpu_times, wall_time

from apex.contrib.bottleneck import Bottleneck
from apex.contrib.conv_bias_relu import ConvBias, ConvBiasMaskReLU, ConvBiasReLU, ConvFrozenScaleBiasReLU

# batch, channels, height (as width), outputs, kernel, padding, stride
CONVOLUTIONS = [(32, 256, 56, 256, 3, 1, 1), (32, 64, 56, 256, 1, 0, 1), (32, 512, 14, 512, 3, 1, 1)]
# batch, channels, height, between, outputs, stride
BLOCKS = [(32, 256, 56, 64, 256, 1), (32, 256, 56, 128, 512, 2), (32, 1024, 14, 256, 1024, 1)]


class FusedByCudnn(torch.autograd.Function):
    """relu(conv + bias), the forward in one call of cuDNN; the backward is torch's."""

    @staticmethod
    def forward(ctx, x, w, b, padding, stride):
        y = torch.cudnn_convolution_relu(x, w, b, [stride] * 2, [padding] * 2, [1, 1], 1)
        ctx.save_for_backward(x, w, b, y)
        ctx.known = padding, stride
        return y

    @staticmethod
    def backward(ctx, g):
        x, w, b, y = ctx.saved_tensors
        return (
            *torch.ops.apex.conv_bias_relu_backward(g, x, w, None, b, y, ctx.known[1], ctx.known[0])[:3],
            None,
            None,
        )


def random(*shape, dtype, scale=1.0):
    made = (torch.randn(*shape, device="cuda") * scale).to(dtype)
    return made.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else made


def convolution(dtype, batch, channels, height, outputs, kernel, padding, stride):
    """kind -> (implementations, leaves, gradient)"""
    x = random(batch, channels, height, height, dtype=dtype).requires_grad_()
    w = random(
        outputs, channels, kernel, kernel, dtype=dtype, scale=(channels * kernel**2) ** -0.5
    ).requires_grad_()
    b, s = random(outputs, dtype=dtype).requires_grad_(), random(outputs, dtype=dtype)
    conv = lambda bias=None: F.conv2d(x, w, bias, stride, padding)  # noqa: E731
    with torch.no_grad():
        g = torch.randn_like(conv())
    mask, wide = (g > 0).to(torch.int8), (1, -1, 1, 1)
    found = {
        "bias relu": (lambda: ConvBiasReLU(x, w, b, padding, stride), lambda: F.relu(conv(b)), (x, w, b)),
        "bias": (lambda: ConvBias(x, w, b, padding, stride), lambda: conv(b), (x, w, b)),
        "bias mask relu": (
            lambda: ConvBiasMaskReLU(x, w, b, mask, padding, stride),
            lambda: F.relu(conv(b) * mask),
            (x, w, b),
        ),
        "scale bias relu": (
            lambda: ConvFrozenScaleBiasReLU(x, w, s, b, padding, stride),
            lambda: F.relu(conv() * s.view(wide) + b.detach().view(wide)),
            (x, w),
        ),
    }
    for kind, (ours, plain, leaves) in found.items():
        functions = {"apex": ours, "torch eager": plain}
        if kind == "bias relu":
            functions["cuDNN fused"] = lambda: FusedByCudnn.apply(x, w, b, padding, stride)
        yield kind, {"convolutions": (conv, (x, w)), **{k: (f, leaves) for k, f in functions.items()}}, g


def bottleneck(dtype, batch, channels, height, between, outputs, stride):
    ours = Bottleneck(channels, between, outputs, stride=stride, use_cudnn=True).to("cuda", dtype)
    ours = ours.to(memory_format=torch.channels_last)
    plain = copy.deepcopy(ours)
    plain.use_cudnn = False
    x = random(batch, channels, height, height, dtype=dtype).requires_grad_()
    w = plain.w_conv

    def convolutions():
        y = F.conv2d(F.conv2d(F.conv2d(x, w[0], None, stride), w[1], padding=1), w[2])
        return y if len(w) == 3 else y + F.conv2d(x, w[3], None, stride)

    with torch.no_grad():
        g = torch.randn_like(ours(x))
    implementations = {
        "convolutions": (convolutions, (x, *w)),
        "apex": (lambda: ours(x), (x, *ours.w_conv)),
        "torch eager": (lambda: plain(x), (x, *w)),
    }
    yield "bottleneck", implementations, g


def report(title, implementations, g, compiles):
    if compiles:
        torch._dynamo.reset()
        function, leaves = implementations["torch eager"]
        implementations["torch.compile"] = torch.compile(function), leaves
    steps = {
        name: lambda function=function, leaves=leaves: torch.autograd.grad(function(), leaves, g)
        for name, (function, leaves) in implementations.items()
    }
    replays = {name: captured(step) for name, step in steps.items()}
    gpu_times(replays, 0)
    rested, sustained = gpu_times(replays, REST), gpu_times(replays, 0)
    for name, step in steps.items():
        above = sustained[name] - sustained["convolutions"]
        print(
            f"| {title} | {name} | {rested[name]:.0f} | {sustained[name]:.0f} | {wall_time(step):.0f} | {above:.0f} |",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--without-compile", action="store_true")
    options = parser.parse_args()
    print("| case | implementation | rested us | sustained us | eager wall us | above convolutions us |")
    print("|---|---|---|---|---|---|")
    for dtype in (torch.float16, torch.bfloat16):
        for make, cases in ((convolution, CONVOLUTIONS), (bottleneck, BLOCKS)):
            for sizes in cases:
                torch.manual_seed(0)
                for kind, implementations, g in make(dtype, *sizes):
                    title = f"{kind} {'x'.join(map(str, sizes))} {str(dtype).removeprefix('torch.')}"
                    if options.only in title:
                        report(title, implementations, g, not options.without_compile)


if __name__ == "__main__":
    main()
