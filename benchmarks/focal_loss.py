"""Sigmoid focal loss on a GPU, forward and backward together, beside the same in torch's ops.

usage: python benchmarks/focal_loss.py [--only 88] [--without-compile] [--accuracy] [--json FILE]
       python benchmarks/focal_loss.py --accuracy       # without a GPU: the errors alone

Floor: three passes over the logits (the forward reads them; the backward reads them and writes their gradient).
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from _measure import DEVICE, ON_GPU
from _report import Report, parse, print_errors

from apex.contrib.focal_loss.focal_loss import focal_loss

# Examples (anchors of a batch of images), classes with padding, real classes.
CASES = [(8 * 120087, 88, 80), (8 * 120087, 96, 91), (4096, 88, 80)]
ALPHA, GAMMA = 0.25, 2.0


def torch_loss(logits, targets, num_positives, real):
    """The same loss, without label smoothing."""
    x = logits[:, :real].to(torch.promote_types(logits.dtype, torch.float32))
    positive = targets.unsqueeze(1) == torch.arange(real, device=logits.device)
    p = torch.sigmoid(x)
    entropy = F.binary_cross_entropy_with_logits(x, positive.to(x.dtype), reduction="none")
    factor = torch.where(positive, ALPHA * (1 - p) ** GAMMA, (1 - ALPHA) * p**GAMMA)
    return (factor * entropy).masked_fill(targets.unsqueeze(1) == -2, 0).sum() / num_positives


def implementations():
    """name -> function of (logits, targets, number of positives, real classes)"""
    return {
        "apex": lambda *inputs: focal_loss(*inputs, ALPHA, GAMMA),
        "torch eager": torch_loss,
        "torch.compile": torch.compile(torch_loss),
    }


def tensors(count, classes, real, dtype):
    torch.manual_seed(0)
    logits = (torch.randn(count, classes, device=DEVICE, dtype=dtype) - 4).requires_grad_()
    targets = torch.randint(-2, real, (count,), device=DEVICE)
    return logits, targets, torch.tensor(1000.0, device=DEVICE), real


def step_of(function, inputs):
    def step():
        loss = function(*inputs)
        return loss, *torch.autograd.grad(loss, inputs[0])

    return step


def accuracy(count, classes, real, dtype):
    """Prints the largest and the root mean square error of ours and torch's against float64."""
    logits, *rest = tensors(count, classes, real, dtype)
    expected = step_of(torch_loss, (logits.detach().double().requires_grad_(), *rest))()
    for name in ("apex", "torch eager"):
        found = step_of(implementations()[name], (logits, *rest))()
        print_errors(f"{count}x{classes} {str(dtype)[6:]} {name}", ("loss", "gradient"), found, expected)


def times(options):
    report = Report(options)
    for count, classes, real in CASES:
        label = f"focal loss {count}x{classes}"
        if not report.wants(label):
            continue
        inputs = tensors(count, classes, real, torch.float16)
        for name, function in implementations().items():
            report.measure(label, name, step_of(function, inputs), 3 * count * classes * 2)
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
