"""Convolutions with what follows them done in one pass over memory, with public apex's names.

The convolution is torch's: cuDNN's, MIOpen's, the CPU's. Tensors are float16, bfloat16, float32 or float64; x, weight
and mask in any memory format, torch.channels_last is fastest. What all functions take:

    x: [batch, channels, height, width].
    weight: [outputs, channels, rows, columns], of x's dtype; there are no groups and no dilation.
    bias: `outputs` numbers in any shape, as [1, outputs, 1, 1], or None; of any dtype, but float64 with float64 alone.
    padding, stride: whole numbers, of height and width alike.

They return [batch, outputs, ...] in x's dtype, in torch.channels_last if x or the weight is. Under torch.autocast x and
weight are cast to its dtype, under amp's O1 and O4 everything is. They are differentiable any number of times, and
raise TypeError where dtypes, ValueError where shapes or devices do not fit.
"""

from __future__ import annotations

import torch

from apex import amp
from apex._functional import Function, call

_op = torch.ops.apex.conv_bias_relu_forward.default


def _flat(numbers):
    return numbers if numbers is None or numbers.dim() == 1 else numbers.reshape(-1)


@amp.half_function
def _conv(x, weight, scale, bias, residual, mask, padding, stride, relu):
    """relu(conv(x, weight) * scale + bias + residual), as the op of the same arguments."""
    arguments = (x, weight, _flat(scale), _flat(bias), residual, mask, stride, padding, relu)
    return call("conv_bias_relu", _op, 1, arguments)


class ConvBiasReLU_(Function):
    """ConvBiasReLU(x, weight, bias, padding, stride): relu(conv(x, weight) + bias)."""

    @staticmethod
    def forward(ctx, x, weight, bias, padding, stride):
        return _conv(x, weight, None, bias, None, None, padding, stride, True)


class ConvBiasMaskReLU_(Function):
    """ConvBiasMaskReLU(x, weight, bias, mask, padding, stride): relu(conv(x, weight) + bias) where mask is not 0.

    mask: like the output, of any dtype; where it is 0 the output is 0 and passes no gradient.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, mask, padding, stride):
        return _conv(x, weight, None, bias, None, mask, padding, stride, True)


class ConvBias_(Function):
    """ConvBias(x, weight, bias, padding, stride): conv(x, weight) + bias."""

    @staticmethod
    def forward(ctx, x, weight, bias, padding, stride):
        return _conv(x, weight, None, bias, None, None, padding, stride, False)


class ConvFrozenScaleBiasReLU_(Function):
    """ConvFrozenScaleBiasReLU(x, weight, scale, bias, padding, stride): relu(conv(x, weight) * scale + bias).

    scale: like bias, of its dtype. Neither gets a gradient.
    """

    @staticmethod
    def forward(ctx, x, weight, scale, bias, padding, stride):
        scale, bias = (None if t is None else t.detach() for t in (scale, bias))
        return _conv(x, weight, scale, bias, None, None, padding, stride, True)


ConvBiasReLU = ConvBiasReLU_.apply
ConvBiasMaskReLU = ConvBiasMaskReLU_.apply
ConvBias = ConvBias_.apply
ConvFrozenScaleBiasReLU = ConvFrozenScaleBiasReLU_.apply
