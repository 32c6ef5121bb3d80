"""The transducer joint and loss on a GPU, forward and backward together, beside torch's own ops.

usage: python benchmarks/transducer.py [--only joint] [--skip compile] [--split] [--accuracy] [--json FILE]

Floor: for the joint two passes over its output (the forward writes it, the backward reads its gradient; f, g and what
dropout keeps do not count); for the loss three over the logits (read, read, gradient written). Packed cases count the
rows that the items have. torch's joint is whole where ours is packed: it has no packed form.
"""

from __future__ import annotations

import argparse
import itertools

import torch
import torch.nn.functional as F
from _measure import (
    Row,
    attempt,
    copy_bandwidth,
    graph_seconds,
    max_and_rms,
    print_table,
    wall_seconds,
    write_json,
)

import apex
from apex.contrib.transducer import TransducerJoint, TransducerLoss

JOINTS = [  # batch, frames, labels, hidden, options, packed
    (16, 200, 60, 512, dict(relu=True), False),
    (16, 200, 60, 512, {}, False),
    (16, 200, 60, 512, dict(relu=True, dropout=True, dropout_prob=0.1), False),
    (16, 200, 60, 512, dict(relu=True), True),
    (32, 400, 100, 640, dict(relu=True), False),
    (16, 200, 60, 509, dict(relu=True), False),
    (2, 20, 10, 64, dict(relu=True), False),
]
LOSSES = [
    (16, 200, 60, 1024, False),
    (16, 200, 60, 1024, True),
    (32, 400, 60, 29, False),
    (2, 20, 10, 64, False),
]


def lengths(batch, frames, labels, ragged):
    """(frames, labels) of each item: the largest, or from half to all of it."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for size in (frames, labels):
        least = (size + 1) // 2 if ragged else size
        found.append(torch.randint(least, size + 1, (batch,), generator=generator, dtype=torch.int32))
    return [t.cuda() for t in found]


def joint_case(batch, frames, labels, hidden, options, packed, dtype=torch.bfloat16):
    """(label, tensors, functions by name, floor in bytes)"""
    torch.manual_seed(0)
    f, g = (
        torch.randn(batch, n, hidden, device="cuda", dtype=dtype).requires_grad_() for n in (frames, labels)
    )
    f_len, g_len = lengths(batch, frames, labels, packed)
    offset = torch.cumsum(f_len * g_len, 0)
    rows = int(offset[-1])
    packing = (offset, rows) if packed else ()
    joint = TransducerJoint(pack_output=packed, **options)

    def torch_joint(f, g):
        out = f[:, :, None] + g[:, None]
        out = torch.relu(out) if options.get("relu") else out
        return F.dropout(out, options["dropout_prob"]) if options.get("dropout") else out

    functions = {
        "apex": lambda f, g: joint(f, g, f_len, g_len, *packing),
        "torch eager": torch_joint,
        "torch.compile": torch.compile(torch_joint),
    }
    name = "".join(f" {k}" for k in ("relu", "dropout") if options.get(k)) + " packed" * packed
    return (
        f"joint {batch}x{frames}x{labels}x{hidden}{name}",
        (f, g),
        functions,
        2 * rows * hidden * dtype.itemsize,
    )


def torch_loss(logits, label, f_len, y_len):
    """The losses by torch's ops, a diagonal of the lattice at a time."""
    p = F.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
    batch, frames, labels, _ = p.shape
    index = F.pad(label.long(), (0, 1))[:, None, :, None].expand(batch, frames, labels, 1)
    blank, emit = p[..., 0], p.gather(-1, index)[..., 0]
    u = torch.arange(labels, device=p.device)
    value, found = p.new_full((batch, labels), -1e30), []
    value[:, 0] = 0
    for d in range(frames + labels - 1):
        t = (d - u).clamp(0, frames - 1)
        there = (u <= d) & (u > d - frames)
        if d:
            stay = (value + blank[:, (d - 1 - u).clamp(0, frames - 1), u]).masked_fill(u >= d, -1e30)
            go = F.pad((value + emit[:, (d - 1 - u).clamp(0, frames - 1), u])[:, :-1], (1, 0), value=-1e30)
            value = torch.logaddexp(stay, go).masked_fill(~there, -1e30)
        found.append(value + blank[:, t, u])
    ends = torch.stack(found, 1)
    item = torch.arange(batch, device=p.device)
    return -ends[item, f_len.long() - 1 + y_len.long(), y_len.long()]


def loss_case(batch, frames, labels, classes, packed, dtype=torch.bfloat16):
    """As joint_case."""
    torch.manual_seed(0)
    f_len, g_len = lengths(batch, frames, labels, packed)
    y_len = g_len - 1
    offset = torch.cumsum(f_len * g_len, 0)
    rows = int(offset[-1])
    shape = (rows, classes) if packed else (batch, frames, labels, classes)
    logits = torch.randn(shape, device="cuda", dtype=dtype).requires_grad_()
    label = torch.randint(1, classes, (batch, labels - 1), device="cuda", dtype=torch.int32)
    packing = (offset, frames) if packed else ()
    loss = TransducerLoss(packed_input=packed)
    functions = {"apex": lambda x: loss(x, label, f_len, y_len, 0, *packing)}
    if not packed:
        functions["torch eager"] = lambda x: torch_loss(x, label, f_len, y_len)
    name = f"loss {batch}x{frames}x{labels}x{classes}" + " packed" * packed
    return name, (logits,), functions, 3 * rows * classes * dtype.itemsize


def step_of(function, inputs, grad):
    def step():
        return torch.autograd.grad(function(*inputs), inputs, grad)

    return step


def accuracy():
    """Prints the largest and the root mean square error of ours and torch's against float64."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for make, case in ((joint_case, JOINTS[-1]), (loss_case, LOSSES[-1])):
            name, inputs, functions, _ = make(*case, dtype=dtype)
            wide = [t.detach().double().requires_grad_() for t in inputs]
            _, _, exact, _ = make(*case, dtype=torch.float64)
            expected = exact["apex"](*wide)
            grad = torch.randn_like(expected).to(dtype)
            wanted = expected, *torch.autograd.grad(expected, wide, grad.double())
            for who, function in functions.items():
                if who == "torch.compile":
                    continue
                found = function(*inputs)
                found = found, *torch.autograd.grad(found, inputs, grad.to(found.dtype))
                errors = [max_and_rms((a.double() - b).abs()) for a, b in zip(found, wanted, strict=True)]
                print(
                    f"  {name} {str(dtype)[6:]} {who}: max / rms error of value, gradients {', '.join(errors)}"
                )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--skip", default="-", help="implementations whose name contains this are left out")
    parser.add_argument("--split", action="store_true", help="also the forward alone")
    parser.add_argument("--accuracy", action="store_true", help="errors against float64 as well")
    parser.add_argument("--json", help="write all figures to this file")
    arguments = parser.parse_args()
    bandwidth, rows = copy_bandwidth(), []
    cases = itertools.chain(((joint_case, c) for c in JOINTS), ((loss_case, c) for c in LOSSES))
    for make, case in cases:
        torch._dynamo.reset()
        label, inputs, functions, floor = make(*case)
        if arguments.only not in label:
            continue
        for name, function in functions.items():
            if arguments.skip in name:
                continue
            grad = torch.randn_like(function(*inputs))
            step = step_of(function, inputs, grad)
            graph = attempt(graph_seconds, step)
            rows.append(Row(label, name, graph, attempt(wall_seconds, step), floor))
            if arguments.split and name == "apex":

                def forward(function=function, inputs=inputs):
                    with torch.no_grad():
                        return function(*inputs)

                passes = 2 if make is joint_case else 3
                graph = attempt(graph_seconds, forward)
                rows.append(Row(f"{label} forward", name, graph, None, floor // passes))
            del grad, step
        del inputs, functions
    print_table(rows, bandwidth)
    if arguments.accuracy:
        accuracy()
    print("served by", sorted(set(apex.served().items())))
    if arguments.json:
        write_json(arguments.json, rows, bandwidth)


if __name__ == "__main__":
    main()
