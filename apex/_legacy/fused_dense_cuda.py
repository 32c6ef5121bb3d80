"""The functions of public apex's fused_dense_cuda. They record no gradients, as there."""

from __future__ import annotations

import torch

from apex._legacy._raw import raw as _raw
from apex._loader import bindings

bindings.load()
__all__ = [
    "linear_bias_backward",
    "linear_bias_forward",
    "linear_gelu_linear_backward",
    "linear_gelu_linear_forward",
]


@_raw
def linear_bias_forward(input, weight, bias):
    """input weight^T + bias"""
    return torch.ops.apex.dense_forward(input, weight, bias)[0]


@_raw
def linear_bias_backward(input, weight, d_output):
    """[gradient of the input, of the weight, of the bias]"""
    bias = weight.new_empty(weight.shape[0])  # that there is one asks for its gradient
    return list(torch.ops.apex.dense_backward(d_output, input, weight, bias, input))


@_raw
def linear_gelu_linear_forward(input, weight1, bias1, weight2, bias2):
    """[gelu(input weight1^T + bias1), what the layer behind makes of it, what gelu was taken of]"""
    output, hidden, before = torch.ops.apex.dense_gelu_dense_forward(input, weight1, bias1, weight2, bias2)
    return [hidden, output, before]


@_raw
def linear_gelu_linear_backward(input, gelu_in, output1, weight1, weight2, d_output2):
    """[gradient of the input, of weight1, bias1, weight2, bias2]"""
    bias1, bias2 = (weight.new_empty(weight.shape[0]) for weight in (weight1, weight2))
    return list(
        torch.ops.apex.dense_gelu_dense_backward(
            d_output2, input, weight1, bias1, weight2, bias2, output1, gelu_in
        )
    )
