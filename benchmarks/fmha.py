"""Attention of packed sequences on a GPU, forward and backward together, beside torch's.

usage: python benchmarks/fmha.py [--only raw] [--without-compile] [--json FILE]

Sequences are from half to all of the length, dropout 0.1. layer: FMHAFun; beside it torch's attention
(scaled_dot_product_attention) of the same tokens padded to one length with a mask, by itself and compiled, and of
nested tensors without padding. raw: fmhalib's functions, which write the softmax.

Floor: qkv read, the output written; in the backward qkv, output and its gradient read and the gradient written. Of raw
besides four passes over the softmax (written and read in the forward, read in the backward, its gradient written).
"""

from __future__ import annotations

import argparse
import itertools

import torch
import torch.nn.functional as F
from _measure import DEVICE, ON_GPU
from _report import Report, parse

from apex._legacy import fmhalib
from apex.contrib.fmha import FMHAFun

LAYERS = [  # sequences, length, heads, d, dtype
    (32, 512, 16, 64, torch.float16),
    (32, 512, 16, 64, torch.bfloat16),
    (64, 128, 16, 64, torch.float16),
    (8, 2048, 16, 64, torch.float16),
    (32, 512, 8, 128, torch.float16),
]
RAW = [(32, 512, 16, 64, torch.float16), (64, 128, 16, 64, torch.float16)]
DROPOUT = 0.1


def packed(sequences, length, heads, d, dtype):
    """(qkv that requires gradients, cu_seqlens, lengths as numbers)"""
    torch.manual_seed(0)
    lengths = torch.randint(length // 2, length + 1, (sequences,)).tolist()
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    qkv = torch.randn(sum(lengths), 3, heads, d, device=DEVICE, dtype=dtype).requires_grad_()
    return qkv, starts, lengths


def padded(qkv, lengths, length):
    """The same tokens as [sequences, 3, h, length, d], and the mask of those that are there."""
    parts = [F.pad(part, (0, 0) * 3 + (0, length - len(part))) for part in qkv.detach().split(lengths)]
    wide = torch.stack(parts).permute(0, 2, 3, 1, 4).contiguous().requires_grad_()
    places = torch.arange(length, device=DEVICE)
    return wide, places < torch.tensor(lengths, device=DEVICE).view(-1, 1, 1, 1)


def nested(qkv, lengths):
    """q, k and v as nested tensors [sequences, h, tokens, d]."""
    parts = [
        torch.nested.nested_tensor_from_jagged(t.detach().contiguous(), _offsets(lengths))
        for t in qkv.unbind(1)
    ]
    return [part.transpose(1, 2).detach().requires_grad_() for part in parts]


def _offsets(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], device=DEVICE)


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


def layers(report):
    for sequences, length, heads, d, dtype in LAYERS:
        label = f"layer B {sequences} S {length} H {heads} d {d} {str(dtype)[6:]}"
        if not report.wants(label):
            continue
        qkv, starts, lengths = packed(sequences, length, heads, d, dtype)
        floor = (3 + 1 + 3 + 2 + 3) * qkv[:, 0].numel() * dtype.itemsize
        ours = lambda x=qkv, s=starts, n=length: FMHAFun.apply(x, s, DROPOUT, n, True, False)  # noqa: E731
        report.measure(label, "apex", step_of(ours, [qkv]), floor)
        wide, there = padded(qkv, lengths, length)

        def theirs(x=wide, mask=there):
            return F.scaled_dot_product_attention(*x.unbind(1), mask, DROPOUT)

        report.measure(label, "torch sdpa, padded", step_of(theirs, [wide]), floor)
        report.measure(label, "torch.compile, padded", step_of(torch.compile(theirs), [wide]), floor)
        parts = nested(qkv, lengths)
        run = lambda p=parts: F.scaled_dot_product_attention(*p, dropout_p=DROPOUT)  # noqa: E731
        report.measure(label, "torch sdpa, nested", step_of(run, parts), floor)


def raw(report):
    for sequences, length, heads, d, dtype in RAW:
        label = f"raw B {sequences} S {length} H {heads} d {d} {str(dtype)[6:]}"
        if not report.wants(label):
            continue
        qkv, starts, _ = packed(sequences, length, heads, d, dtype)
        qkv, gradient = qkv.detach(), torch.randn_like(qkv[:, 0]).detach()
        tokens, rows = qkv[:, 0].numel(), sequences * heads * length * length

        def step(qkv=qkv, gradient=gradient, starts=starts, length=length):
            _, softmax = fmhalib.fwd(qkv, starts, DROPOUT, length, True, False, False)
            return fmhalib.bwd(gradient, qkv, softmax, starts, DROPOUT, length, False)

        report.measure(label, "apex", step, (12 * tokens + 4 * rows) * dtype.itemsize)


def main():
    options = parse(argparse.ArgumentParser(description=__doc__.splitlines()[0]), accuracy=False)
    if ON_GPU:
        report = Report(options)
        layers(report)
        raw(report)
        report.end()


if __name__ == "__main__":
    main()
