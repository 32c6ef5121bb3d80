"""Rotary embeddings on a GPU, forward and backward together, beside torch's own.

usage: python benchmarks/rotary.py [--only thd] [--without-compile] [--accuracy] [--json FILE]
       python benchmarks/rotary.py --accuracy       # without a GPU: the errors alone

Floor: four passes over the heads (forward reads the input and writes the output, backward reads one gradient and
writes the other). Angles do not count.
"""

from __future__ import annotations

import argparse

import torch
from _measure import DEVICE, ON_GPU
from _report import Report, parse, print_errors

from apex.transformer import functional

# name -> form, shape, elements of a head that turn
CASES = {
    "rotary 4096x4x32x128": ("freqs", (4096, 4, 32, 128), 128),
    "rotary cached 4096x4x32x128": ("cached", (4096, 4, 32, 128), 128),
    "rotary transposed 4096x4x32x128": ("transposed", (4096, 4, 32, 128), 128),
    "rotary half of 4096x4x32x128": ("freqs", (4096, 4, 32, 128), 64),
    "rotary thd 16384x32x128": ("thd", (16384, 32, 128), 128),
    "rotary 2d 16x64x64x16x128": ("2d", (16, 64, 64, 16, 128), 64),
    "rotary 128x1x8x64": ("freqs", (128, 1, 8, 64), 64),
    "rotary 1024x1x16x64": ("freqs", (1024, 1, 16, 64), 64),
}


def rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def implementations(form, shape, rotary):
    """name -> function of the input alone"""
    angles = torch.rand(shape[0], 1, 1, rotary // 2, device=DEVICE) * 100
    freqs = torch.cat((angles, angles), -1)
    cos, sin = freqs.cos().bfloat16(), freqs.sin().bfloat16()
    if form == "thd":
        ends = torch.arange(0, shape[0] + 1, 1024, dtype=torch.int32, device=DEVICE)
        rows = torch.arange(shape[0], device=DEVICE) % 1024
        c, s = (f(freqs[rows, 0]).bfloat16() for f in (torch.cos, torch.sin))

        def own(x):
            return rotate(x, c, s)

        def ours(x):
            return functional.fused_apply_rotary_pos_emb_thd(x, ends, freqs)
    elif form == "2d":
        h, w = shape[1:3]
        tables = [
            f(torch.rand(1, n, 1, rotary, device=DEVICE) * 100)
            for n in (h, w)
            for f in (torch.cos, torch.sin)
        ]
        tables = [t.bfloat16() for t in tables]

        def own(x):
            first, second = x.chunk(2, -1)
            first = rotate(first, tables[0][:, :, None], tables[1][:, :, None])
            second = rotate(second, tables[2][:, None], tables[3][:, None])
            return torch.cat((first, second), -1)

        def ours(x):
            return functional.fused_apply_rotary_pos_emb_2d(x.flatten(1, 2), h, w, *tables)
    else:

        def own(x):
            turned = rotate(x[..., :rotary], freqs.cos().to(x.dtype), freqs.sin().to(x.dtype))
            return turned if rotary == shape[-1] else torch.cat((turned, x[..., rotary:]), -1)

        def ours(x):
            if form == "cached":
                return functional.fused_apply_rotary_pos_emb_cached(x, cos, sin)
            return functional.fused_apply_rotary_pos_emb(x, freqs, form == "transposed")

    found = {"apex": ours, "torch eager": own, "torch.compile": torch.compile(own)}
    liger = _liger(cos, sin) if form in ("freqs", "cached") and rotary == shape[-1] else None
    return found | ({"Liger": liger} if liger else {})


def _liger(cos, sin):
    """Liger turns queries and keys [batch, heads, places, dim] in one call: half of the heads each."""
    try:
        from liger_kernel.ops.rope import LigerRopeFunction
    except ImportError:
        return None
    c, s = cos[:, 0, 0].unsqueeze(0), sin[:, 0, 0].unsqueeze(0)

    def run(x):
        q, k = x.permute(1, 2, 0, 3).chunk(2, 1)
        return LigerRopeFunction.apply(q, k, c, s)

    return run


def accuracy(dtype, shape=(2048, 2, 16, 128)):
    """Prints the largest and the root mean square error of ours and torch's against float64."""
    torch.manual_seed(0)
    angles = torch.rand(shape[0], 1, 1, shape[-1] // 2, device=DEVICE) * 2048
    freqs = torch.cat((angles, angles), -1)
    x = torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True)
    g = torch.randn_like(x)

    def own(x):
        wide = freqs.double() if x.dtype == torch.float64 else freqs
        return rotate(x, wide.cos().to(x.dtype), wide.sin().to(x.dtype))

    wide = x.detach().double().requires_grad_()
    exact = own(wide)
    exact = (exact, *torch.autograd.grad(exact, wide, g.double()))
    for name, function in (
        ("apex", lambda x: functional.fused_apply_rotary_pos_emb(x, freqs)),
        ("torch eager", own),
    ):
        y = function(x)
        title = f"rotary {str(dtype)[6:]} {name}"
        print_errors(title, ("output", "gradient"), (y, *torch.autograd.grad(y, x, g)), exact)


def step_of(function, x, g):
    def step():
        y = function(x)
        if isinstance(y, tuple):  # Liger's halves
            return y, torch.autograd.grad(y, x, g.permute(1, 2, 0, 3).chunk(2, 1))
        return y, torch.autograd.grad(y, x, g.view(y.shape))

    return step


def times(options):
    report = Report(options)
    for label, (form, shape, rotary) in CASES.items():
        if not report.wants(label):
            continue
        torch.manual_seed(0)
        x = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        g = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
        for name, function in implementations(form, shape, rotary).items():
            report.measure(label, name, step_of(function, x, g), 4 * x.numel() * 2)
    report.end()


def main():
    options = parse(argparse.ArgumentParser(description=__doc__.splitlines()[0]))
    if ON_GPU:
        times(options)
    if options.accuracy:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            accuracy(dtype)


if __name__ == "__main__":
    main()
