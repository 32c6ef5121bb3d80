"""Optimizers over combined tensors, and what amp does around a backward pass, on a GPU, beside torch's own.

usage: python benchmarks/combined_tensors.py [--small] [--only adamw] [--without-compile] [--json FILE]

Shapes as in optimizers.py: GPT-2 355M (292 tensors, float32), and 161 tensors of 1,024 elements, where a step moves
hardly a byte. Floors, bytes a parameter, each tensor read and written once: AdamW 28, with amsgrad 36, SGD with
momentum 20, RMSprop 20 to 36, Adadelta 28, BertAdam 28, LAMB 40 (moments 28, update 12). AdamP is held against the
floor of its elementwise part, 28. Unscaling float16 gradients into masters and zeroing both: 12.
"""

from __future__ import annotations

import argparse

import torch
from _report import Report, parse
from optimizers import gpt2_355m, parameters

from apex import amp, optimizers


def started(params, make, level="O1", **options):
    """An optimizer under amp over parameters that have gradients."""
    optimizer = make(params)
    model = torch.nn.ParameterList(params)
    amp._amp_state.allow_incoming_model_not_fp32 = True
    _, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    return optimizer


def combined(kind, **options):
    def make(params):
        return started(params, lambda p: getattr(optimizers, kind)(p, **options), loss_scale=1.0).step

    return make


def torchs(kind, **options):
    return lambda params: getattr(torch.optim, kind)(params, **options).step


def compiled(kind, **options):
    def make(params):
        optimizer = getattr(torch.optim, kind)(params, **options)
        return torch.compile(optimizer.step)

    return make


def of_torch(kind, floor, fused=False, capturable=True, name=None, **options):
    """A case with a counterpart in torch."""
    more = dict(capturable=True) if capturable else {}
    implementations = {
        f"apex Combined{kind}": combined(f"Combined{kind}", **options),
        "torch foreach": torchs(kind, foreach=True, **more, **options),
        "torch.compile": compiled(kind, foreach=True, **more, **options),
    }
    if fused:
        implementations["torch fused"] = torchs(kind, fused=True, **more, **options)
    return name or kind, floor, implementations


CASES = [
    of_torch("AdamW", 28, fused=True, lr=1e-4, weight_decay=0.1),
    of_torch("AdamW", 36, fused=True, name="AdamW amsgrad", lr=1e-4, weight_decay=0.1, amsgrad=True),
    of_torch("SGD", 20, fused=True, capturable=False, lr=1e-3, momentum=0.9, weight_decay=1e-4),
    of_torch("RMSprop", 20, lr=1e-4),
    of_torch("RMSprop", 36, name="RMSprop centered, momentum", lr=1e-4, centered=True, momentum=0.9),
    of_torch("Adadelta", 28, lr=0.1),
    ("RMSpropTF", 28, {"apex CombinedRMSpropTF": combined("CombinedRMSpropTF", lr=1e-4, momentum=0.9)}),
    (
        "BertAdam",
        28,
        {"apex CombinedBertAdam": combined("CombinedBertAdam", lr=1e-4, t_total=1000, warmup=0.1)},
    ),
    (
        "LAMB",
        40,
        {
            "apex CombinedLamb": combined("CombinedLamb", lr=1e-4, weight_decay=0.1),
            "apex Lamb": lambda params: optimizers.Lamb(params, lr=1e-4, weight_decay=0.1).step,
        },
    ),
    ("AdamP", 28, {"apex CombinedAdamP": combined("CombinedAdamP", lr=1e-4, weight_decay=0.1)}),
]


def around_a_pass(params, combine):
    """scale_loss without a backward pass in it, and zero_grad: O2, float16 gradients that are there already."""
    halves = [torch.nn.Parameter(p.detach().half()) for p in params]
    optimizer = started(
        halves, lambda p: torch.optim.SGD(p, lr=0.1), "O2", combine_grad=combine, loss_scale="dynamic"
    )
    loss = torch.zeros((), device="cuda")
    gradients = [torch.full_like(p, 1e-3) for p in halves]

    def step():
        with amp.scale_loss(loss, optimizer, delay_overflow_check=True):
            for p, gradient in zip(halves, gradients, strict=True):
                if p.grad is None:  # else it is in its buffer, and autograd would add
                    p.grad = gradient
        optimizer.zero_grad()

    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="only the 161 small tensors")
    options = parse(parser, accuracy=False)
    report = Report(options)
    sets = {"161 x 1024": [(1024,)] * 161}
    if not options.small:
        sets = {"GPT-2 355M": gpt2_355m(), **sets}
    passes = {
        "apex combine_grad": lambda params: around_a_pass(params, True),
        "apex": lambda params: around_a_pass(params, None),
    }
    for label, shapes in sets.items():
        for case, per_parameter, implementations in [*CASES, ("unscale, zero_grad", 12, passes)]:
            for name, make in implementations.items():
                if not report.wants(f"{label} {case}", name):
                    continue
                params = parameters(shapes)
                count = sum(p.numel() for p in params)
                report.measure(f"{label} {case}", name, make(params), per_parameter * count)
                del params
    report.end()


if __name__ == "__main__":
    main()
