"""Softmax cross entropy with label smoothing on a GPU, forward and backward together, beside torch's own.

usage: python benchmarks/xentropy.py [--only 50304] [--without-compile] [--split] [--accuracy] [--json FILE]
       python benchmarks/xentropy.py --accuracy       # without a GPU: the errors alone

Floor: three passes over the logits (the forward reads them; the backward reads them and writes their gradient).
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from _measure import DEVICE, ON_GPU, event_seconds, graph_seconds
from _peers import quack_cross_entropy
from _report import Report, parse, print_errors

from apex.contrib.xentropy import SoftmaxCrossEntropyLoss

LARGE = [(8192, 50304), (4096, 128256), (8192, 50257), (64, 128256), (65536, 1000)]
SMALL = [(1024, 1024), (128, 1000)]
SMOOTHING = 0.1


def implementations():
    """name -> function of (logits, labels) that gives the mean loss, or what stands for it"""

    def torch_loss(logits, labels):
        return F.cross_entropy(logits, labels, label_smoothing=SMOOTHING)

    found = {
        "apex": lambda x, t: SoftmaxCrossEntropyLoss.apply(x, t, SMOOTHING, -100, True).mean(),
        "torch eager": torch_loss,
        "torch.compile": torch.compile(torch_loss),
    }
    found |= quack_cross_entropy()
    try:
        from liger_kernel.transformers.functional import liger_cross_entropy
    except ImportError:
        return found
    # The last: it writes the gradient over the logits, so they are others afterwards.
    return found | {"Liger": lambda x, t: liger_cross_entropy(x, t, label_smoothing=SMOOTHING)}


def tensors(rows, classes, dtype):
    torch.manual_seed(0)
    logits = torch.randn(rows, classes, device=DEVICE, dtype=dtype).requires_grad_()
    return logits, torch.randint(0, classes, (rows,), device=DEVICE)


def step_of(function, logits, labels):
    def step():
        loss = function(logits, labels)
        return loss, torch.autograd.grad(loss, logits)

    return step


def accuracy(rows, classes, dtype):
    """Prints the largest and the root mean square error of ours and torch's against float64."""
    logits, labels = tensors(rows, classes, dtype)
    wide = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(wide, labels, reduction="none", label_smoothing=SMOOTHING)
    (wanted,) = torch.autograd.grad(expected.sum(), wide)
    for name, function in {
        "apex": lambda x, t: SoftmaxCrossEntropyLoss.apply(x, t, SMOOTHING, -100),
        "apex half_to_float": lambda x, t: SoftmaxCrossEntropyLoss.apply(x, t, SMOOTHING, -100, True),
        "torch": lambda x, t: F.cross_entropy(x, t, reduction="none", label_smoothing=SMOOTHING),
    }.items():
        losses = function(logits, labels)
        (gradient,) = torch.autograd.grad(losses.sum(), logits)
        title = f"{rows}x{classes} {str(dtype)[6:]} {name}"
        print_errors(title, ("loss", "gradient"), (losses, gradient), (expected, wanted))


def times(options):
    report, dtype = Report(options), torch.bfloat16
    for count, classes in [*LARGE, *SMALL]:
        label = f"cross entropy {count}x{classes}"
        if not report.wants(label):
            continue
        logits, labels = tensors(count, classes, dtype)
        tensor = count * classes * dtype.itemsize
        for name, function in implementations().items():
            # Liger's asks the GPU how many labels count, which a capture refuses.
            gpu = event_seconds if name == "Liger" else graph_seconds
            report.measure(label, name, step_of(function, logits, labels), 3 * tensor, gpu)
            if options.split and "compile" not in name and name != "Liger":

                def forward(function=function, inputs=(logits, labels)):
                    with torch.no_grad():
                        return function(*inputs)

                report.measure(f"{label} forward", name, forward, tensor, wall=None)
    report.end()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--split", action="store_true", help="also the forward alone (one pass)")
    options = parse(parser)
    if ON_GPU:
        times(options)
    if options.accuracy:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            accuracy(1024 if ON_GPU else 64, 50304, dtype)


if __name__ == "__main__":
    main()
