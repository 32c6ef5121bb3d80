"""The transducer joint and loss on a GPU, forward and backward together, beside torch's own ops.

usage: python benchmarks/transducer.py [--only joint] [--without-compile] [--split] [--accuracy] [--json FILE]
       python benchmarks/transducer.py --accuracy       # without a GPU: the errors alone

Floor: for the joint two passes over its output (the forward writes it, the backward reads its gradient; f, g and what
dropout keeps do not count); for the loss three over the logits (read, read, gradient written). Packed cases count the
rows that the items have. torch's joint is whole where ours is packed: it has no packed form.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from _measure import DEVICE, ON_GPU
from _report import Report, parse, print_errors

from apex.contrib.transducer import TransducerJoint, TransducerLoss

JOINTS = [  # batch, frames, labels, hidden, options, packed
    (16, 200, 60, 512, dict(relu=True), False),
    (32, 400, 100, 640, dict(relu=True), False),
    (16, 200, 60, 512, dict(relu=True, dropout=True, dropout_prob=0.1), False),
    (16, 200, 60, 512, dict(relu=True), True),
    (16, 200, 60, 512, {}, False),
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
    return [t.to(DEVICE) for t in found]


@dataclass
class Case:
    """inputs: those with gradients. functions: by the implementation's name, of the inputs. floor: bytes."""

    inputs: tuple
    functions: dict
    floor: int
    forward_floor: int


def joint_label(batch, frames, labels, hidden, options, packed):
    name = "".join(f" {k}" for k in ("relu", "dropout") if options.get(k)) + " packed" * packed
    return f"joint {batch}x{frames}x{labels}x{hidden}{name}"


def joint_case(batch, frames, labels, hidden, options, packed, dtype=torch.bfloat16):
    torch.manual_seed(0)
    f, g = (
        torch.randn(batch, n, hidden, device=DEVICE, dtype=dtype).requires_grad_() for n in (frames, labels)
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
    output = rows * hidden * dtype.itemsize
    return Case((f, g), functions, 2 * output, output)


def torch_loss(logits, label, f_len, y_len):
    """The losses by torch's ops, a diagonal of the lattice at a time."""
    p = F.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
    batch, frames, labels, _ = p.shape
    index = F.pad(label.long(), (0, 1))[:, None, :, None].expand(batch, frames, labels, 1)
    d, u = torch.arange(frames + labels - 1, device=p.device)[:, None], torch.arange(labels, device=p.device)
    t = (d - u).clamp(0, frames - 1)
    nowhere = ((u > d) | (u <= d - frames)).unbind()
    blank, emit = p[..., 0][:, t, u], p.gather(-1, index)[..., 0][:, t, u]  # [batch, diagonals, labels]
    value = p.new_full((batch, labels), -1e30)
    value[:, 0] = 0
    found = [value]
    for stay, go, outside in zip(blank.unbind(1), emit.unbind(1), nowhere[1:], strict=False):
        go = F.pad((value + go)[:, :-1], (1, 0), value=-1e30)
        value = torch.logaddexp(value + stay, go).masked_fill(outside, -1e30)
        found.append(value)
    ends = torch.stack(found, 1) + blank
    item = torch.arange(batch, device=p.device)
    return -ends[item, f_len.long() - 1 + y_len.long(), y_len.long()]


def loss_label(batch, frames, labels, classes, packed):
    return f"loss {batch}x{frames}x{labels}x{classes}" + " packed" * packed


def loss_case(batch, frames, labels, classes, packed, dtype=torch.bfloat16):
    torch.manual_seed(0)
    f_len, g_len = lengths(batch, frames, labels, packed)
    y_len = g_len - 1
    offset = torch.cumsum(f_len * g_len, 0)
    rows = int(offset[-1])
    shape = (rows, classes) if packed else (batch, frames, labels, classes)
    label = torch.randint(1, classes, (batch, labels - 1), device=DEVICE, dtype=torch.int32)
    logits = torch.randn(shape, device=DEVICE, dtype=dtype).requires_grad_()
    packing = (offset, frames) if packed else ()
    loss = TransducerLoss(packed_input=packed)
    functions = {"apex": lambda x: loss(x, label, f_len, y_len, 0, *packing)}
    if not packed:
        functions["torch eager"] = lambda x: torch_loss(x, label, f_len, y_len)
    read = rows * classes * dtype.itemsize
    return Case((logits,), functions, 3 * read, read)


KINDS = ((joint_label, joint_case, JOINTS), (loss_label, loss_case, LOSSES))


def step_of(function, inputs):
    gradient = None

    def step():
        nonlocal gradient
        output = function(*inputs)
        if gradient is None:  # the first call is no graph's
            gradient = torch.randn_like(output)
        return torch.autograd.grad(output, inputs, gradient)

    return step


def accuracy():
    """Prints the largest and the root mean square error of ours and torch's against float64."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for label, make, cases in KINDS:
            case, exact = make(*cases[-1], dtype=dtype), make(*cases[-1], dtype=torch.float64)
            wide = [t.detach().double().requires_grad_() for t in case.inputs]
            expected = exact.functions["apex"](*wide)
            grad = torch.randn_like(expected).to(dtype)
            wanted = expected, *torch.autograd.grad(expected, wide, grad.double())
            for who in ("apex", "torch eager"):
                found = case.functions[who](*case.inputs)
                found = found, *torch.autograd.grad(found, case.inputs, grad.to(found.dtype))
                title = f"{label(*cases[-1])} {str(dtype)[6:]} {who}"
                print_errors(title, ("value", "gradient", "gradient of g"), found, wanted)


def times(options):
    report = Report(options)
    for label_of, make, cases in KINDS:
        for values in cases:
            label = label_of(*values)
            if not report.wants(label):
                continue
            case = make(*values)
            for name, function in case.functions.items():
                report.measure(label, name, step_of(function, case.inputs), case.floor)
                if options.split and name == "apex":

                    def forward(function=function, inputs=case.inputs):
                        with torch.no_grad():
                            return function(*inputs)

                    report.measure(f"{label} forward", name, forward, case.forward_floor, wall=None)
            del case, function  # gigabytes
    report.end()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--split", action="store_true", help="also the forward alone")
    options = parse(parser)
    if ON_GPU:
        times(options)
    if options.accuracy:
        accuracy()


if __name__ == "__main__":
    main()
