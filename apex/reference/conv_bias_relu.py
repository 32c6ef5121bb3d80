"""Convolution, scale, bias, addition and ReLU in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from apex.reference._leaves import differentiate
from apex.reference.dense import _cast

_OP = "conv_bias_relu"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _check_sizes(input, weight, stride, padding):
    if input.dim() != 4 or weight.dim() != 4 or input.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{_OP}: input [batch, channels, height, width] and weight [outputs, channels, height, width] do not fit "
            f"(there are no groups): {list(input.shape)} and {list(weight.shape)}"
        )
    if stride < 1 or padding < 0:
        raise ValueError(f"{_OP}: stride must be at least 1 and padding 0, not {stride} and {padding}")
    if 0 in weight.shape:
        raise ValueError(f"{_OP}: the weight, {list(weight.shape)}, has no elements")
    for d in (2, 3):
        if input.shape[d] + 2 * padding < weight.shape[d]:
            raise ValueError(
                f"{_OP}: the weight, {list(weight.shape)}, is larger than the input, {list(input.shape)}, with a "
                f"padding of {padding}"
            )


def _check_beside(name, tensor, input, dtype=None):
    if tensor.device != input.device:
        raise ValueError(f"{_OP}: {name} is on {tensor.device} but the input is on {input.device}")
    if dtype is not None and tensor.dtype != dtype:
        raise TypeError(f"{_OP}: the input is {dtype}, {name} {tensor.dtype}")


def _check(input, weight, scale, bias, stride, padding):
    """The output's shape."""
    if input.dtype not in _FLOATS:
        raise TypeError(f"{_OP} takes float32, float16, bfloat16 and float64, not {input.dtype}")
    _check_sizes(input, weight, stride, padding)
    _check_beside("the weight", weight, input, input.dtype)
    for name, tensor in (("scale", scale), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dim() != 1 or tensor.shape[0] != weight.shape[0]:
            raise ValueError(
                f"{_OP}: {name} has shape {list(tensor.shape)} but the weight {weight.shape[0]} outputs"
            )
        _check_beside(name, tensor, input)
        if tensor.dtype not in _FLOATS or (tensor.dtype == torch.float64) != (input.dtype == torch.float64):
            raise TypeError(
                f"{_OP}: float64 goes with float64 alone: the input is {input.dtype}, the {name} {tensor.dtype}"
            )
    if scale is not None and bias is not None and scale.dtype != bias.dtype:
        raise TypeError(f"{_OP}: scale and bias must have one dtype")
    sizes = ((input.shape[d] + 2 * padding - weight.shape[d]) // stride + 1 for d in (2, 3))
    return (input.shape[0], weight.shape[0], *sizes)


def _check_like(name, tensor, shape, input, dtype):
    if tensor.shape != shape:
        raise ValueError(f"{_OP}: {name} has shape {list(tensor.shape)}, the output {list(shape)}")
    _check_beside(name, tensor, input, dtype)


def _format(input, weight):
    """What a convolution reads and writes: channels last where the input or the weight is, as torch's."""
    last = torch.channels_last
    known = (t.is_contiguous(memory_format=last) and not t.is_contiguous() for t in (input, weight))
    return last if any(known) else torch.contiguous_format


def _wide(tensor):
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _over_channels(numbers):
    return _wide(numbers).view(1, -1, 1, 1)


def conv_bias_relu_forward(
    input, weight, scale=None, bias=None, residual=None, mask=None, stride=1, padding=0, relu=True
):
    """relu(conv(input, weight) * scale + bias + residual) where mask is not 0, else 0; or without the ReLU.

    input: [batch, channels, height, width] float16, bfloat16, float32 or float64. weight: [outputs, channels, rows,
    columns], of its dtype. scale, bias: [outputs] of one dtype, float64 with float64 alone; scale gets no gradient.
    residual: like the output, of its dtype; mask: like the output, any dtype, with a ReLU alone. stride, padding: of
    both dimensions. Returns [batch, outputs, ...] of the input's dtype, in torch.channels_last if the input or the
    weight is. Raises TypeError and ValueError.
    """
    shape = _check(input, weight, scale, bias, stride, padding)
    if residual is not None:
        _check_like("residual", residual, shape, input, input.dtype)
    if mask is not None:
        if not relu:
            raise ValueError(f"{_OP}: a mask goes with a ReLU")
        _check_like("mask", mask, shape, input, None)
    # A CPU's convolution adds the bias before it rounds.
    biased = scale is None and bias is not None
    x = _wide(F.conv2d(input, weight, bias.to(input.dtype) if biased else None, stride, padding))
    if scale is not None:
        x = x * _over_channels(scale)
    if bias is not None and not biased:
        x = x + _over_channels(bias)
    if residual is not None:
        x = x + residual
    if relu:
        x = torch.relu(x)
    if mask is not None:
        x = x.masked_fill(mask == 0, 0)
    return x.to(input.dtype).contiguous(memory_format=_format(input, weight))


def _gradients(grad_output, input, weight, scale, bias, output, stride, padding, wanted):
    of_input, of_weight, of_bias, of_residual = wanted
    format = _format(input, weight)
    of_nothing = lambda: input.new_empty(0)  # noqa: E731  one for each result: none may alias another
    g = grad_output if output is None else grad_output * ~(output <= 0)  # a nan passes
    sums = _wide(g).sum((0, 2, 3)).to(bias.dtype) if of_bias and bias is not None else of_nothing()
    rest = g.contiguous(memory_format=format) if of_residual else of_nothing()
    rest = rest.clone() if rest is grad_output else rest
    if not of_input and not of_weight:
        return of_nothing(), of_nothing(), sums, rest
    if scale is not None:
        g = (_wide(g) * _over_channels(scale)).to(input.dtype)
    found = torch.ops.aten.convolution_backward(
        g, input, weight, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, [of_input, of_weight, False]
    )  # fmt: skip
    made = [
        t.contiguous(memory_format=format) if want else of_nothing()
        for t, want in zip(found[:2], wanted[:2], strict=True)
    ]
    return *made, sums, rest


def conv_bias_relu_backward(
    grad_output,
    input,
    weight,
    scale,
    bias,
    output,
    stride=1,
    padding=0,
    of_input=True,
    of_weight=True,
    of_bias=True,
    of_residual=False,
):
    """(gradient of the input, of the weight, of the bias, of the residual); without elements where not wanted.

    output: the forward's, whose zeros pass nothing; or None where there was no ReLU.
    """
    shape = _check(input, weight, scale, bias, stride, padding)
    for tensor in (grad_output, output):
        if tensor is not None and (tensor.shape != shape or tensor.device != input.device):
            raise ValueError(
                f"{_OP}: the gradient has shape {list(tensor.shape)} on {tensor.device}, not {list(shape)} on "
                f"{input.device}"
            )
        if tensor is not None and tensor.dtype != input.dtype:
            raise TypeError(f"{_OP}: the gradient is {tensor.dtype}, not {input.dtype}")
    wanted = (of_input, of_weight, of_bias, of_residual)
    return _gradients(grad_output, input, weight, scale, bias, output, stride, padding, wanted)


_NAMES = ("input", "weight", "scale", "bias", "residual", "mask", "stride", "padding", "relu")
_DEFAULTS = (None, None, None, None, 1, 0, True)


class _Pair:
    """autograd and autocast of the op, as torch.library wants them."""

    name = _OP

    def setup_context(self, ctx, inputs, output):
        """Keeps the operands, and the output whose zeros the ReLU made."""
        input, weight, scale, bias, _, _, stride, padding, relu = (*inputs, *_DEFAULTS[len(inputs) - 2 :])
        ctx.save_for_backward(input, weight, scale, bias, output if relu else None)
        ctx.known = stride, padding

    def backward(self, ctx, grad):
        """Gradients of the forward's inputs, through the backward op."""
        needs = (*ctx.needs_input_grad, *(False,) * 9)[:9]
        wanted = (needs[0], needs[1], needs[3], needs[4])
        found = torch.ops.apex.conv_bias_relu_backward(grad, *ctx.saved_tensors, *ctx.known, *wanted)
        x, w, b, r = (g if want else None for g, want in zip(found, wanted, strict=True))
        return x, w, None, b, r, None, None, None, None

    def setup_double_context(self, ctx, inputs, output):
        """Keeps all inputs of the backward."""
        ctx.save_for_backward(*inputs[:6])
        ctx.known = (*inputs[6:], *(1, 0, True, True, True, False)[len(inputs) - 6 :])
        ctx.set_materialize_grads(False)

    def double_backward(self, ctx, *gradients):
        """By torch's own differentiable ops."""
        stride, padding, *wanted = ctx.known
        grad, input, weight, scale, bias, output = ctx.saved_tensors
        again = lambda g, x, w: _gradients(g, x, w, scale, bias, output, stride, padding, wanted)  # noqa: E731
        return *differentiate(again, (grad, input, weight), gradients), *(None,) * 9

    def autocast(self, device_type, arguments, keywords):
        """What is convolved and added is of autocast's dtype; scale, bias and mask stay."""
        arguments = dict(zip(_NAMES, arguments, strict=False)) | keywords
        cast = ("input", "weight", "residual")
        return arguments | _cast(device_type, {name: arguments[name] for name in cast if name in arguments})


PAIRS = (_Pair(),)
