"""Multihead attention on a GPU, forward and backward together, beside torch's.

usage: python benchmarks/multihead_attn.py [--only core] [--split] [--without-compile] [--json FILE]

core: from query, key and value to the heads' results, padding mask, dropout 0.1; beside it torch's ops one by one,
scaled_dot_product_attention, and the products alone, which no implementation that writes the probabilities can be
faster than. softmax: our two kernels. module: norm, projections, attention, dropout and residual.

Floor: of core and softmax six passes over the probabilities (read; softmax and dropout's result written; gradient and
softmax read, gradient written), the products' own accesses not counted; of the module the same.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from _measure import DEVICE, ON_GPU
from _report import Report, parse

from apex._random import new_seed
from apex.contrib.multihead_attn import SelfMultiheadAttn, _core

CORES = [  # batch, length, heads, d, masked, dtype
    (32, 512, 16, 64, True, torch.float16),
    (64, 128, 16, 64, True, torch.float16),
    (32, 512, 16, 64, True, torch.bfloat16),
    (8, 1024, 16, 64, True, torch.float16),
    (8, 2048, 16, 64, True, torch.float16),
    (32, 512, 16, 64, False, torch.float16),
    (64, 128, 16, 64, False, torch.float16),
]
MODULES = [(32, 512, 1024, 16), (64, 128, 1024, 16)]  # batch, length, width, heads
DROPOUT = 0.1


def padding(batch, length):
    """uint8, 1 where a key is left out: items are from half to all of the length."""
    ends = torch.randint(length // 2, length + 1, (batch, 1), device=DEVICE)
    return (torch.arange(length, device=DEVICE) >= ends).to(torch.uint8)


def step_of(function, leaves):
    """Forward and backward of `function`, with a random gradient."""
    gradient = None

    def step():
        nonlocal gradient
        output = function()
        if gradient is None:  # the first call is no graph's
            gradient = torch.randn_like(output)
        return torch.autograd.grad(output, leaves, gradient)

    return step


def core_functions(packed, heads, mask):
    """By the implementation's name, of [T, B, 3 C] where each head has its query, key and value side by side."""
    length, batch, width = packed.shape
    d = width // (3 * heads)
    wide = None if mask is None else mask[:, None, None]
    left_out = None if mask is None else wide.bool()

    def by_heads():
        return packed.view(length, batch, heads, 3, d).permute(3, 1, 2, 0, 4).unbind()

    def eager():
        q, k, v = _core.split(packed, heads, 3)
        q, k, v = q.transpose(0, 1), k.permute(1, 2, 0), v.transpose(0, 1)
        scores = torch.baddbmm(q.new_empty(1, 1, 1), q, k, beta=0, alpha=d**-0.5).view(
            batch, heads, length, length
        )
        if left_out is not None:
            scores = scores.masked_fill(left_out, -torch.inf)
        p = F.dropout(torch.softmax(scores, -1), DROPOUT).view(-1, length, length)
        return torch.bmm(p, v).transpose(0, 1).reshape(length, batch, -1)

    def sdpa():
        q, k, v = by_heads()
        with torch.nn.attention.sdpa_kernel(list(_core._EXACT_DROPOUT)):
            out = F.scaled_dot_product_attention(q, k, v, None if left_out is None else ~left_out, DROPOUT)
        return out.permute(2, 0, 1, 3).reshape(length, batch, -1)

    return {
        "apex": lambda: _core.attention(packed, None, heads, wide, DROPOUT),
        "torch eager": eager,
        "torch.compile": torch.compile(eager),
        "torch sdpa": sdpa,
    }


def products(packed, heads):
    """The six products of forward and backward, written as ours are."""
    q, k, v = _core.split(packed.detach(), heads, 3)
    made = torch.empty_like(packed)
    grad_q, grad_k, grad_v = _core.split(made, heads, 3)

    def step():
        p = _core.scores_of(q, k, q.shape[2] ** -0.5)
        grad = _core.products_backward(_core.context_of(p, v), p, v, grad_v)
        _core.scores_backward(grad, q, k, q.shape[2] ** -0.5, grad_q, grad_k)

    return step


def cores(report, options):
    for batch, length, heads, d, masked, dtype in CORES:
        label = f"core B {batch} S {length} H {heads} d {d} {str(dtype)[6:]}" + " padded" * masked
        if not report.wants(label):
            continue
        torch.manual_seed(0)
        packed = torch.randn(length, batch, 3 * heads * d, device=DEVICE, dtype=dtype).requires_grad_()
        mask = padding(batch, length) if masked else None
        passes = batch * heads * length * length * dtype.itemsize
        report.measure(label, "products", products(packed, heads), 6 * passes)
        for name, function in core_functions(packed, heads, mask).items():
            report.measure(label, name, step_of(function, packed), 6 * passes)
        if options.split:
            softmax_alone(
                report, label.replace("core", "softmax"), (batch, heads, length, length), mask, dtype, passes
            )
        del packed


def softmax_alone(report, label, shape, mask, dtype, passes):
    """Our two kernels, apart."""
    scores = torch.randn(shape, device=DEVICE, dtype=dtype)
    wide = None if mask is None else mask[:, None, None]
    forward, backward = (
        getattr(torch.ops.apex, f"masked_softmax_dropout_{direction}")
        for direction in ("forward", "backward")
    )
    seed = new_seed(scores.device)
    output, softmax, _ = forward(scores, wide, DROPOUT, seed)
    report.measure(f"{label} forward", "apex", lambda: forward(scores, wide, DROPOUT, seed), 3 * passes)
    report.measure(
        f"{label} backward", "apex", lambda: backward(output, softmax, None, DROPOUT, seed), 3 * passes
    )


class Torch(torch.nn.Module):
    """What SelfMultiheadAttn with include_norm_add is, of torch's modules."""

    def __init__(self, width, heads):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.attention = torch.nn.MultiheadAttention(width, heads, DROPOUT)

    def forward(self, x, mask):
        n = self.norm(x)
        return x + F.dropout(self.attention(n, n, n, key_padding_mask=mask, need_weights=False)[0], DROPOUT)


def module_functions(x, mask, width, heads):
    """By the implementation's name: (its parameters, a function)."""
    torch.manual_seed(0)
    ours = SelfMultiheadAttn(width, heads, DROPOUT, True, True).to(DEVICE).half()
    theirs, left_out = Torch(width, heads).to(DEVICE).half(), mask.bool()
    graph = torch.compile(theirs)
    return {
        "apex": (ours.parameters(), lambda: ours(x, x, x, key_padding_mask=mask)[0]),
        "torch eager": (theirs.parameters(), lambda: theirs(x, left_out)),
        "torch.compile": (theirs.parameters(), lambda: graph(x, left_out)),
    }


def modules(report):
    for batch, length, width, heads in MODULES:
        label = f"module B {batch} S {length} C {width} H {heads}"
        if not report.wants(label):
            continue
        x = torch.randn(length, batch, width, device=DEVICE, dtype=torch.float16).requires_grad_()
        floor = 6 * batch * heads * length * length * 2
        for name, (parameters, function) in module_functions(x, padding(batch, length), width, heads).items():
            report.measure(label, name, step_of(function, [x, *parameters]), floor)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--split", action="store_true", help="also our kernels alone")
    options = parse(parser, accuracy=False)
    if ON_GPU:
        report = Report(options)
        cores(report, options)
        modules(report)
        report.end()


if __name__ == "__main__":
    main()
