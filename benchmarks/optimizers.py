"""Fused optimizers and gradient clipping on a GPU, beside torch's own.

usage: python benchmarks/optimizers.py [--small] [--only adamw] [--without-compile] [--json FILE]

Shapes: GPT-2 355M (292 tensors, float32), and 161 tensors of 1,024 elements for the cost of a step that moves
hardly a byte. Floors, bytes a parameter: AdamW 28 (4 read, 3 written), SGD with momentum 20, LAMB 44 (norm 4,
moments 28, update 12), clipping above the limit 12, below it 4.
"""

from __future__ import annotations

import argparse
import functools

import torch
from _report import Report, parse

from apex import optimizers
from apex.contrib.clip_grad import clip_grad_norm_


def gpt2_355m() -> list[tuple[int, ...]]:
    """Shapes of GPT-2 medium: 24 layers, width 1,024, vocabulary 50,257, context 1,024."""
    width = 1024
    layer = [
        (width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,),
        (width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,),
    ]  # fmt: skip
    return [(50257, width), (1024, width), *(24 * layer), (width,), (width,)]


def parameters(shapes, dtype=torch.float32):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, device="cuda").mul_(0.02).to(dtype)) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p).mul_(1e-3)
    return params


def clipping(params, clip, share):
    """A step that clips to `share` of the norm, again and again: one small gradient is large, and set anew in
    each step, so that the norm stays what it is while the others shrink by a thousandth."""
    for p in params:
        p.grad.normal_(std=1e-3)  # whatever the cases before left there
    anchor = params[2].grad
    anchor.fill_(100.0)
    limit = share * torch.nn.utils.get_total_norm([p.grad for p in params]).item()

    def step():
        anchor.fill_(100.0)
        clip(params, limit)

    return step


def stepper(make):
    """A function that makes an optimizer, and returns its step."""
    return lambda: make().step


def compiled(make):
    """As stepper, of the step that torch.compile makes of it."""
    return lambda: torch.compile(make().step)


def of_torch(params):
    """What torch has too, as `cases`."""
    adam, optim = dict(lr=1e-4, weight_decay=0.1), torch.optim
    implementations = {
        "apex FusedAdam": stepper(lambda: optimizers.FusedAdam(params, **adam)),
        "torch fused": stepper(lambda: optim.AdamW(params, fused=True, capturable=True, **adam)),
        "torch foreach": stepper(lambda: optim.AdamW(params, foreach=True, capturable=True, **adam)),
        "torch.compile": compiled(lambda: optim.AdamW(params, foreach=True, capturable=True, **adam)),
    }
    yield "AdamW", 28, implementations
    capturable = stepper(lambda: optimizers.FusedAdam(params, capturable=True, **adam))
    yield "AdamW capturable", 28, {"apex FusedAdam": capturable}
    sgd = dict(lr=1e-3, momentum=0.9, weight_decay=1e-4)
    implementations = {
        "apex FusedSGD": stepper(lambda: optimizers.FusedSGD(params, **sgd)),
        "torch fused": stepper(lambda: optim.SGD(params, fused=True, **sgd)),
        "torch foreach": stepper(lambda: optim.SGD(params, foreach=True, **sgd)),
        "torch.compile": compiled(lambda: optim.SGD(params, foreach=True, **sgd)),
    }
    yield "SGD momentum", 20, implementations


def of_clipping(params):
    """Clipping by the norm of all gradients, as `cases`."""
    torch_clip = functools.partial(torch.nn.utils.clip_grad_norm_, foreach=True)
    for case, floor, limit in (("clip above the limit", 12, 0.999), ("clip below the limit", 4, 1e3)):
        implementations = {
            "apex": lambda limit=limit: clipping(params, clip_grad_norm_, limit),
            "torch foreach": lambda limit=limit: clipping(params, torch_clip, limit),
            "torch.compile": lambda limit=limit: clipping(params, torch.compile(torch_clip), limit),
        }
        yield case, floor, implementations


def cases(params):
    """(case, floor bytes a parameter, {implementation: function that makes a step})."""
    yield from of_torch(params)
    lamb = dict(lr=1e-4, weight_decay=0.1)
    implementations = {
        f"apex {name}": stepper(lambda name=name: getattr(optimizers, name)(params, **lamb))
        for name in ("FusedLAMB", "FusedMixedPrecisionLamb")
    }
    yield "LAMB", 44, implementations
    yield from of_clipping(params)
    for name, floor in (("FusedAdagrad", 20), ("FusedNovoGrad", 24), ("FusedLARS", 28)):
        make = stepper(lambda name=name: getattr(optimizers, name)(params, lr=1e-4))
        yield name.removeprefix("Fused"), floor, {f"apex {name}": make}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="only the 161 small tensors")
    options = parse(parser, accuracy=False)
    report = Report(options)
    sets = {"161 x 1024": [(1024,)] * 161}
    if not options.small:
        sets = {"GPT-2 355M": gpt2_355m(), **sets}
    for label, shapes in sets.items():
        params = parameters(shapes)
        count = sum(p.numel() for p in params)
        for case, per_parameter, implementations in cases(params):
            if not report.wants(f"{label} {case}"):
                continue
            for name, make in implementations.items():
                report.measure(f"{label} {case}", name, make(), per_parameter * count)
        del params
    report.end()


if __name__ == "__main__":
    main()
