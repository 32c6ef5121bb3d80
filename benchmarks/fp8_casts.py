"""FP8 casts on a GPU beside what torch has for them.

usage: python benchmarks/fp8_casts.py [--only transpose] [--without-compile] [--accuracy] [--json FILE]
       python benchmarks/fp8_casts.py --accuracy       # without a GPU: how many codes differ from the definition's

Floor: every input read once, every output written once, of bfloat16 and a byte a code. Scales and amax do not count,
sums of columns as the float for each 128 rows that they are on the way.
"""

from __future__ import annotations

import argparse

import torch
from _measure import DEVICE, ON_GPU
from _report import Report, parse

from apex import _fp8
from apex.reference import fp8
from apex.transformer_engine.common.recipe import DelayedScaling
from apex.transformer_engine.pytorch import _scaling

SHAPE = (8192, 16384)
SCALES = 1800  # 300 modules with 6 FP8 tensors each
MODULES = 300
E4M3, E5M2 = _fp8.formats(DEVICE)


def tensors(rows, columns):
    torch.manual_seed(0)
    x = torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16)
    return x, torch.full((1,), 2.0, device=DEVICE), torch.zeros(1, device=DEVICE)


def of_torch(x, scale, amax):
    """A cast by torch's own ops: three passes, or one of torch.compile's."""
    torch.maximum(amax, x.abs().amax().float(), out=amax)
    largest = fp8.FORMATS[E4M3].maximum
    return (x.float() * scale).clamp(-largest, largest).to(E4M3)


def both_of_torch(x, scale, amax):
    q = of_torch(x, scale, amax)
    return q, q.view(torch.uint8).t().contiguous()


def cases(rows, columns):
    """(name, bytes, {implementation: step})"""
    x, scale, amax = tensors(rows, columns)
    before = torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16)
    wide = torch.randn(rows, 2 * columns, device=DEVICE, dtype=torch.bfloat16)
    q = _fp8.quantize(x, scale, E4M3)
    count, sums = rows * columns, rows * columns // 32
    compiled, both = torch.compile(of_torch), torch.compile(both_of_torch)
    yield "quantize", 3 * count, {
        "apex": lambda: _fp8.quantize(x, scale, E4M3, amax),
        "torch eager": lambda: of_torch(x, scale, amax),
        "torch.compile": lambda: compiled(x, scale, amax),
    }  # fmt: skip
    yield "quantize_transpose", 4 * count, {
        "apex": lambda: _fp8.quantize_transpose(x, scale, E4M3, amax),
        "torch eager": lambda: both_of_torch(x, scale, amax),
        "torch.compile": lambda: both(x, scale, amax),
    }  # fmt: skip
    yield "quantize_transpose, bias gradient", 4 * count + sums, {
        "apex": lambda: _fp8.quantize_transpose(x, scale, E5M2, amax, True),
    }  # fmt: skip
    yield "quantize_transpose, bias gradient, dgelu", 6 * count + sums, {
        "apex": lambda: _fp8.quantize_transpose(x, scale, E5M2, amax, True, before, "gelu"),
    }  # fmt: skip
    yield "quantize_transpose, dswiglu", 10 * count, {
        "apex": lambda: _fp8.quantize_transpose(x, scale, E5M2, amax, False, wide, "silu", True),
    }  # fmt: skip
    yield "swiglu to FP8", 5 * count, {
        "apex": lambda: _fp8.quantize(wide, scale, E4M3, amax, "silu", True),
    }  # fmt: skip
    yield "dequantize", 3 * count, {
        "apex": lambda: _fp8.dequantize(q, scale, torch.bfloat16),
        "torch eager": lambda: q.to(torch.bfloat16),
    }  # fmt: skip
    yield "transpose", 2 * count, {
        "apex": lambda: _fp8.transpose(q),
        "torch eager": lambda: q.view(torch.uint8).t().contiguous(),
    }  # fmt: skip
    weight = torch.randn(columns, device=DEVICE, dtype=torch.bfloat16)
    yield "rms_norm to FP8", 3 * count, {
        "apex": lambda: _fp8.rms_norm(x, weight, 1e-5, scale, E4M3, amax),
    }  # fmt: skip
    yield "layer_norm to FP8", 3 * count, {
        "apex": lambda: _fp8.layer_norm(x, weight, weight, 1e-5, scale, E4M3, amax),
    }  # fmt: skip
    scales = count // 128 * 4
    yield "quantize_blocks 1x128, both layouts", 4 * count + 2 * scales, {
        "apex": lambda: _fp8.quantize_blocks(x, E4M3, (1, 128), columnwise=True),
    }  # fmt: skip
    yield "quantize_blocks 128x128, both layouts", 4 * count, {
        "apex": lambda: _fp8.quantize_blocks(x, E4M3, (128, 128), columnwise=True),
    }  # fmt: skip


def update_case(rows):
    """The update of all scales of 300 modules."""
    history = torch.rand(rows, SCALES, device=DEVICE)
    scale, inverse, largest = (torch.ones(SCALES, device=DEVICE) for _ in range(3))

    def step():
        _fp8.update_scales(history, scale, inverse, largest)
        return scale

    return f"update_scales {SCALES}, history {rows}", 8 * rows * SCALES, {"apex": step}


def modules_case(rows):
    """The update of the histories of 300 te.Linear, each two, as they lie in a training run: one launch."""
    device = torch.device(DEVICE)
    scalings = [_scaling.Scaling(count, rows, device) for _ in range(MODULES) for count in (3, 2)]
    for scaling in scalings:
        scaling.amax_history.copy_(torch.rand_like(scaling.amax_history))
    _scaling.update(
        scalings, [448.0] * len(scalings), DelayedScaling()
    )  # the scales lie together from now on
    histories, scales = [s.amax_history for s in scalings], [s.scale for s in scalings]
    count = sum(scale.numel() for scale in scales)
    largest = torch.full((count,), 448.0, device=device)

    def step():
        return _fp8.multi_update_scales(histories, scales, largest)

    return f"new scales of {MODULES} modules, history {rows}", 8 * rows * count, {"apex": step}


def times(options):
    report = Report(options)
    every = [
        (f"{name} {rows}x{columns}", nbytes, found)
        for rows, columns in (SHAPE, (8192, 4096), (4096, 4096))
        for name, nbytes, found in cases(rows, columns)
    ]
    updates = [case(rows) for case in (update_case, modules_case) for rows in (16, 1024)]
    for label, nbytes, found in [*every, *updates]:
        if not report.wants(label):
            continue
        for implementation, step in found.items():
            report.measure(label, implementation, step, nbytes)
    report.end()


def accuracy():
    """Prints how many codes of each format differ from the reference's, of all bfloat16 numbers."""
    x = (
        torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device=DEVICE)
        .to(torch.int16)
        .view(torch.bfloat16)
    )
    scale = torch.ones(1, device=DEVICE)
    for dtype in fp8.FORMATS:
        found, wanted = (
            _fp8.quantize(x.view(256, 256), scale, dtype),
            fp8.quantize(x.cpu(), scale.cpu(), dtype),
        )
        differ = found.view(torch.uint8).cpu().view(-1) != wanted.view(torch.uint8)
        print(f"{str(dtype)[6:]}: {int(differ.sum())} of {x.numel()} codes differ")


def main():
    options = parse(argparse.ArgumentParser(description=__doc__.splitlines()[0]))
    if ON_GPU:
        times(options)
    if options.accuracy:
        accuracy()


if __name__ == "__main__":
    main()
