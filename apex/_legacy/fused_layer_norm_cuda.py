"""The functions of public apex's fused_layer_norm_cuda. They record no gradients, as there."""

from __future__ import annotations

import torch

from apex._legacy._raw import raw as _raw
from apex._loader import bindings

bindings.load()
_ops = torch.ops.apex

__all__ = [
    "backward",
    "backward_affine",
    "forward",
    "forward_affine",
    "forward_affine_mixed_dtypes",
    "rms_backward",
    "rms_backward_affine",
    "rms_forward",
    "rms_forward_affine",
    "rms_forward_affine_mixed_dtypes",
]


@_raw
def forward_affine(input, normalized_shape, gamma, beta, epsilon):
    """[output in the input's dtype, mean, 1 / standard deviation], one element of these a row."""
    return list(_ops.layer_norm_forward(input, normalized_shape, gamma, beta, epsilon))


@_raw
def forward(input, normalized_shape, epsilon):
    """As forward_affine, without weights."""
    return list(_ops.layer_norm_forward(input, normalized_shape, None, None, epsilon))


@_raw
def forward_affine_mixed_dtypes(input, normalized_shape, gamma, beta, epsilon):
    """As forward_affine; the output has gamma's dtype."""
    return list(_ops.layer_norm_forward(input, normalized_shape, gamma, beta, epsilon, False, gamma.dtype))


@_raw
def backward_affine(
    dout, mean, invvar, input_or_output, normalized_shape, gamma, beta, epsilon, memory_efficient
):
    """[gradient of the input, of gamma, of beta]; `input_or_output` is the output if memory_efficient."""
    return list(
        _ops.layer_norm_backward(
            dout, input_or_output, mean, invvar, normalized_shape, gamma, beta, epsilon, memory_efficient
        )
    )


@_raw
def backward(dout, mean, invvar, input_or_output, normalized_shape, epsilon, memory_efficient):
    """The gradient of the input."""
    return _ops.layer_norm_backward(
        dout, input_or_output, mean, invvar, normalized_shape, None, None, epsilon, memory_efficient
    )[0]


@_raw
def rms_forward_affine(input, normalized_shape, gamma, epsilon):
    """[output in the input's dtype, 1 / root mean square], one element of that a row."""
    return list(_ops.rms_norm_forward(input, normalized_shape, gamma, epsilon))


@_raw
def rms_forward(input, normalized_shape, epsilon):
    """As rms_forward_affine, without a weight."""
    return list(_ops.rms_norm_forward(input, normalized_shape, None, epsilon))


@_raw
def rms_forward_affine_mixed_dtypes(input, normalized_shape, gamma, epsilon):
    """As rms_forward_affine; the output has gamma's dtype."""
    return list(_ops.rms_norm_forward(input, normalized_shape, gamma, epsilon, False, gamma.dtype))


@_raw
def rms_backward_affine(dout, invvar, input_or_output, normalized_shape, gamma, epsilon, memory_efficient):
    """[gradient of the input, of gamma]"""
    return list(
        _ops.rms_norm_backward(
            dout, input_or_output, invvar, normalized_shape, gamma, epsilon, memory_efficient
        )
    )


@_raw
def rms_backward(dout, invvar, input_or_output, normalized_shape, epsilon, memory_efficient):
    """The gradient of the input."""
    return _ops.rms_norm_backward(
        dout, input_or_output, invvar, normalized_shape, None, epsilon, memory_efficient
    )[0]
