"""Sigmoid focal loss on a GPU, forward and backward together, beside the same in torch's ops.

usage: python benchmarks/focal_loss.py [--skip compile]

Floor: three passes over the logits (the forward reads them; the backward reads them and writes their gradient).
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from _measure import Row, attempt, copy_bandwidth, graph_seconds, print_table, wall_seconds

import apex
from apex.contrib.focal_loss.focal_loss import focal_loss

# Examples (anchors of a batch of images), classes with padding, real classes.
CASES = [(8 * 120087, 88, 80), (8 * 120087, 96, 91), (4096, 88, 80)]
ALPHA, GAMMA = 0.25, 2.0


def torch_loss(logits, targets, num_positives, real):
    """The same loss, without label smoothing."""
    x = logits[:, :real].float()
    positive = targets.unsqueeze(1) == torch.arange(real, device=logits.device)
    p = torch.sigmoid(x)
    entropy = F.binary_cross_entropy_with_logits(x, positive.float(), reduction="none")
    factor = torch.where(positive, ALPHA * (1 - p) ** GAMMA, (1 - ALPHA) * p**GAMMA)
    return (factor * entropy).masked_fill(targets.unsqueeze(1) == -2, 0).sum() / num_positives


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--skip", default="-", help="implementations whose name contains this are left out")
    arguments = parser.parse_args()
    bandwidth, rows = copy_bandwidth(), []
    for count, classes, real in CASES:
        torch._dynamo.reset()
        torch.manual_seed(0)
        logits = (torch.randn(count, classes, device="cuda", dtype=torch.float16) - 4).requires_grad_()
        targets = torch.randint(-2, real, (count,), device="cuda")
        num_positives = torch.tensor(1000.0, device="cuda")
        for name, function in {
            "apex": lambda x, t, n, real: focal_loss(x, t, n, real, ALPHA, GAMMA),
            "torch eager": torch_loss,
            "torch.compile": torch.compile(torch_loss),
        }.items():
            if arguments.skip in name:
                continue

            def step(function=function, inputs=(logits, targets, num_positives, real)):
                return torch.autograd.grad(function(*inputs), inputs[0])

            label = f"focal loss {count}x{classes}"
            graph = attempt(graph_seconds, step)
            rows.append(Row(label, name, graph, attempt(wall_seconds, step), 3 * count * classes * 2))
    print_table(rows, bandwidth)
    print("served by", sorted(set(apex.served().items())))


if __name__ == "__main__":
    main()
