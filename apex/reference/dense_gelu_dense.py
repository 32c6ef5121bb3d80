"""dense, gelu, dense in plain PyTorch: products are torch's."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from apex.reference._leaves import differentiate
from apex.reference.dense import (
    _cast,
    _check,
    _check_input,
    _check_like,
    _gradients,
    _product,
    _slope,
)

_OP = "dense_gelu_dense"


def _check_layers(input, weight1, bias1, weight2, bias2):
    _check_input(_OP, input)
    _check(_OP, input, input.shape[-1], weight1, bias1)
    _check(_OP, input, weight1.shape[0], weight2, bias2)


def dense_gelu_dense_forward(input, weight1, bias1, weight2, bias2):
    """(gelu(input weight1^T + bias1) weight2^T + bias2, that GELU, what it was taken of).

    input: [..., inputs] float16, bfloat16, float32 or float64; weight1: [hidden, inputs], bias1: [hidden] or None,
    weight2: [outputs, hidden], bias2: [outputs] or None, of its dtype. GELU is its tanh form. Results are
    [..., outputs], [..., hidden] and [..., hidden]. Raises TypeError and ValueError.
    """
    _check_layers(input, weight1, bias1, weight2, bias2)
    before = _product(input, weight1, bias1)
    hidden = F.gelu(before, approximate="tanh")
    return _product(hidden, weight2, bias2), hidden, before


def dense_gelu_dense_backward(
    grad_output,
    input,
    weight1,
    bias1,
    weight2,
    bias2,
    hidden,
    before,
    of_input=True,
    of_first=True,
    of_second=True,
):
    """Gradients of input, weight1, bias1, weight2, bias2; without elements where not wanted, or there is no bias.

    hidden, before: as the forward gave them. of_first: of weight1 and bias1; of_second: of weight2 and bias2.
    """
    _check_layers(input, weight1, bias1, weight2, bias2)
    _check_like(_OP, grad_output, input, weight2.shape[0])
    for kept in (hidden, before):
        _check_like(_OP, kept, input, weight1.shape[0])
    g, *second = _gradients(grad_output, hidden, weight2, bias2, True, of_second, of_second)
    g = (g * _slope(before, "gelu")).to(input.dtype)
    return *_gradients(g, input, weight1, bias1, of_input, of_first, of_first), *second


class _Pair:
    """autograd and autocast, as torch.library wants them."""

    name = _OP

    def setup_context(self, ctx, inputs, output):
        """Keeps the operands, the hidden layer and what it is the GELU of."""
        ctx.mark_non_differentiable(output[1], output[2])
        ctx.save_for_backward(*inputs, *output[1:])
        ctx.set_materialize_grads(False)

    def backward(self, ctx, grad, *_):
        """Gradients of the forward's inputs, through the backward op."""
        if grad is None:
            return (None,) * 5
        needed = ctx.needs_input_grad
        wanted = (needed[0], needed[1] or needed[2], needed[3] or needed[4])
        found = torch.ops.apex.dense_gelu_dense_backward(grad, *ctx.saved_tensors, *wanted)
        return tuple(g if want else None for g, want in zip(found, needed, strict=True))

    def setup_double_context(self, ctx, inputs, output):
        """Keeps all inputs of the backward but what it can compute anew."""
        ctx.save_for_backward(*inputs[:6])
        ctx.known = (*inputs[8:], *(True, True, True)[len(inputs) - 8 :])
        ctx.set_materialize_grads(False)

    def double_backward(self, ctx, *gradients):
        """By torch's own differentiable ops."""
        of_input, of_first, of_second = ctx.known

        def again(grad, input, weight1, bias1, weight2, bias2):
            before = F.linear(input, weight1, bias1)
            hidden = F.gelu(before, approximate="tanh")
            g, *second = _gradients(grad, hidden, weight2, bias2, True, of_second, of_second)
            g = g * _slope(before, "gelu").to(g.dtype)
            return *_gradients(g, input, weight1, bias1, of_input, of_first, of_first), *second

        return *differentiate(again, ctx.saved_tensors, gradients), None, None, None, None, None

    def autocast(self, device_type, arguments, keywords):
        """All operands are of autocast's dtype."""
        names = ("input", "weight1", "bias1", "weight2", "bias2")
        return _cast(device_type, dict(zip(names, arguments, strict=False)) | keywords)


PAIRS = (_Pair(),)
