"""What the four softmax modules of public apex share. Their functions are raw."""

from __future__ import annotations

import torch

from apex._loader import bindings

bindings.load()


def check(name, tensor, dims):
    """Raises ValueError unless the tensor has so many dimensions."""
    if tensor.dim() != dims:
        raise ValueError(f"{name} has {dims} dimensions, not {tensor.dim()}: shape {list(tensor.shape)}")


def forward(input, mask, scale_factor, causal=False):
    """softmax(scale_factor * input), masked. scale_factor: a number, or a tensor of one on the CPU."""
    return torch.ops.apex.scaled_masked_softmax_forward(input, mask, float(scale_factor), causal)


def backward(output_grads, softmax_results, scale_factor, causal=False):
    """The gradient of the input, a fresh tensor."""
    op = torch.ops.apex.scaled_masked_softmax_backward
    return op(output_grads, softmax_results, float(scale_factor), causal)
