"""The functions of public apex's fused_conv_bias_relu. They record no gradients, as there.

Tensors come in lists, as there: x [batch, channels, height, width], weight [outputs, channels, rows, columns]; bias and
scale of `outputs` numbers in any shape, as [1, outputs, 1, 1]. Gradients of a bias are [1, outputs, 1, 1] in float32
(float64 beside float64).
"""

from __future__ import annotations

import torch

from apex._legacy._raw import raw as _raw
from apex._loader import bindings

bindings.load()
__all__ = [
    "backward",
    "backward_cscale_cbias_relu",
    "backward_no_relu",
    "forward",
    "forward_cscale_cbias_relu",
    "forward_mask",
    "forward_no_relu",
]


def _flat(numbers):
    return None if numbers is None else numbers.reshape(-1)


def _forward(x, weight, scale, bias, mask, padding, stride, relu):
    return torch.ops.apex.conv_bias_relu_forward(
        x, weight, _flat(scale), _flat(bias), None, mask, stride, padding, relu
    )


def _backward(x, weight, scale, output, grad, padding, stride):
    """[gradient of x, of the weight, of a bias]"""
    math = torch.float64 if x.dtype == torch.float64 else torch.float32
    # That there is one asks for its gradient; beside a scale, which is frozen, there is none.
    bias = None if scale is not None else weight.new_empty(weight.shape[0], dtype=math)
    found = torch.ops.apex.conv_bias_relu_backward(
        grad, x, weight, _flat(scale), bias, output, stride, padding
    )
    return [*found[:2], found[2].view(1, -1, 1, 1)]


@_raw
def forward(inputs, padding, stride):
    """[relu(conv(x, weight) + bias)] of [x, weight, bias]"""
    x, weight, bias = inputs
    return [_forward(x, weight, None, bias, None, padding, stride, True)]


@_raw
def backward(inputs, padding, stride):
    """[gradient of x, of the weight, of the bias] of [x, weight, output, gradient]; of forward_mask's output, too"""
    x, weight, output, grad = inputs
    return _backward(x, weight, None, output, grad, padding, stride)


@_raw
def forward_no_relu(inputs, *arguments, **keywords):
    """[conv(x, weight) + bias]: forward_no_relu([x, weight, bias], padding, stride), or
    forward_no_relu(x, weight, bias, padding, stride, use_relu), which may take the ReLU of it."""
    if isinstance(inputs, torch.Tensor):
        return _forward_of_tensors(inputs, *arguments, **keywords)
    return _forward_of_list(inputs, *arguments, **keywords)


def _forward_of_tensors(x, weight, bias, padding, stride, use_relu):
    return [_forward(x, weight, None, bias, None, padding, stride, use_relu)]


def _forward_of_list(inputs, padding, stride):
    x, weight, bias = inputs
    return [_forward(x, weight, None, bias, None, padding, stride, False)]


@_raw
def backward_no_relu(inputs, padding, stride):
    """[gradient of x, of the weight, of the bias] of [x, weight, gradient]"""
    x, weight, grad = inputs
    return _backward(x, weight, None, None, grad, padding, stride)


@_raw
def forward_mask(inputs, padding, stride):
    """[relu(conv(x, weight) + bias) where mask is not 0, else 0] of [x, weight, bias, mask]"""
    x, weight, bias, mask = inputs
    return [_forward(x, weight, None, bias, mask, padding, stride, True)]


@_raw
def forward_cscale_cbias_relu(inputs, padding, stride):
    """relu(conv(x, weight) * scale + bias) of [x, weight, scale, bias]"""
    x, weight, scale, bias = inputs
    return _forward(x, weight, scale, bias, None, padding, stride, True)


@_raw
def backward_cscale_cbias_relu(inputs, padding, stride):
    """[gradient of x, of the weight] of [x, weight, scale, output, gradient]"""
    x, weight, scale, output, grad = inputs
    return _backward(x, weight, scale, output, grad, padding, stride)[:2]
