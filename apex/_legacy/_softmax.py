"""What the four softmax modules of public apex share. Their functions record no gradients, as there."""

from __future__ import annotations

import torch

from apex._functional import is_autocast_enabled
from apex._loader import bindings

bindings.load()


def check(name, tensor, dims):
    """Raises ValueError unless the tensor has so many dimensions."""
    if tensor.dim() != dims:
        raise ValueError(f"{name} has {dims} dimensions, not {tensor.dim()}: shape {list(tensor.shape)}")


@torch.no_grad()
def _run(op, *arguments):
    """The op on the tensors as they are: autocast is for the functions above these modules."""
    device_type = arguments[0].device.type
    if not is_autocast_enabled(device_type):
        return op(*arguments)
    with torch.autocast(device_type, enabled=False):
        return op(*arguments)


def forward(input, mask, scale_factor, causal=False):
    """softmax(scale_factor * input), masked. scale_factor: a number, or a tensor of one on the CPU."""
    return _run(torch.ops.apex.scaled_masked_softmax_forward, input, mask, float(scale_factor), causal)


def backward(output_grads, softmax_results, scale_factor, causal=False):
    """The gradient of the input, a fresh tensor."""
    op = torch.ops.apex.scaled_masked_softmax_backward
    return _run(op, output_grads, softmax_results, float(scale_factor), causal)
