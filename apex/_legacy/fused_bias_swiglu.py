"""The functions of public apex's fused_bias_swiglu. They record no gradients, as there."""

from __future__ import annotations

import torch

from apex._legacy._raw import raw as _raw
from apex._loader import bindings

bindings.load()

__all__ = ["backward", "forward"]


@_raw
def forward(input, bias):
    """silu(u1) * u2 of the two halves of u = input + bias; input [rows, 2 n], bias [2 n]; [rows, n]."""
    return torch.ops.apex.bias_activation_forward(input, bias, "silu", True)


@_raw
def backward(grad_output, input, bias):
    """The gradient of the input, [rows, 2 n]; summed over rows, it is that of the bias."""
    return torch.ops.apex.bias_activation_backward(grad_output, input, bias, "silu", True, False)[0]
