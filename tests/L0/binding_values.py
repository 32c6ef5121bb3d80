"""What the binding of this process computes: digests of every op's results, for a test that compares bindings.

    python binding_values.py

prints {"kind": ..., "digests": {op and sample: [digest of each result and of each argument afterwards]}} as JSON.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import sys

import torch

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[1])]

from op_samples import SAMPLES, Values, samples  # noqa: E402

from apex._loader import bindings, registry  # noqa: E402


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def digest(tensor):
    """Of dtype, sizes, strides and bits: nan equals itself, 0 is not -0. Strides of dimensions of 1 say nothing."""
    t = tensor.detach()
    strides = [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] if t.numel() else []
    bits = t.contiguous().flatten().view(torch.uint8) if t.numel() else t
    text = f"{t.dtype} {list(t.shape)} {strides}".encode()
    return hashlib.sha256(text + bytes(bits.tolist()) if t.numel() else text).hexdigest()[:16]


def _run(name, arguments):
    """Results and arguments of an op; of a differentiable one the gradients, too."""
    op, schema = getattr(torch.ops.apex, name), registry.schemas()[name]
    leaves = []
    if schema.differentiable and not name.endswith("_backward"):
        for argument in schema.differentiable:
            tensor = arguments.get(argument)
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                leaves.append(tensor.requires_grad_())
    found = op(**arguments)
    results = [*_tensors(found)]
    if leaves and results[0].numel():
        found = torch.autograd.grad(results[0], leaves, torch.ones_like(results[0]), allow_unused=True)
        results += [t for t in found if t is not None]
    return [*results, *_tensors(arguments)]


def _run_entry(entry, name, arguments):
    """The same of the direct entry of a differentiable op: what eager calls take."""
    schema, leaves = registry.schemas()[name], []
    for argument in schema.differentiable:
        if isinstance(tensor := arguments.get(argument), torch.Tensor):
            leaves.append(tensor.requires_grad_())
    defaults = {a.name: a.default for a in schema.arguments}
    found = entry(*({**defaults, **arguments}[a.name] for a in schema.arguments))
    results = [*_tensors(found)]
    if results[0].numel():
        loss = sum(t.double().sum() for t in results if t.requires_grad)
        results += [t for t in torch.autograd.grad(loss, leaves, allow_unused=True) if t is not None]
    return results


def main():
    torch.set_num_threads(1)
    loaded, digests = bindings.load(), {}
    for name, index in samples():
        if index is None:
            continue
        arguments = SAMPLES[name][index](Values("cpu"))
        digests[f"{name} {index}"] = [digest(t) for t in _run(name, arguments)]
        entry = getattr(loaded.module, name.removesuffix("_forward"), None)
        if entry and name.endswith("_forward") and registry.schemas()[name].differentiable:
            arguments = SAMPLES[name][index](Values("cpu"))
            digests[f"{name} {index}, entry"] = [digest(t) for t in _run_entry(entry, name, arguments)]
    print(json.dumps({"kind": loaded.kind, "digests": digests}))


if __name__ == "__main__":
    main()
