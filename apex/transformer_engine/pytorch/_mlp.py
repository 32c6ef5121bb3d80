"""Two products with an activation between them: it is made, and its gradient, in the same pass as their casts."""

from __future__ import annotations

import torch

from apex._once import differentiable_once, in_given_dtypes
from apex.transformer_engine.pytorch import _linear as parts
from apex.transformer_engine.pytorch._norms import Statistics
from apex.transformer_engine.pytorch._products import product
from apex.transformer_engine.pytorch._switches import ranged


class MLP(torch.autograd.Function):
    """apply(input, gamma, beta, weight1, bias1, weight2, bias2, plans, activation), of quantized values.

    f(norm(input) weight1^T + bias1) weight2^T + bias2. input [..., inputs], weight1 [hidden, inputs], or twice the rows
    where the activation is gated, weight2 [outputs, hidden]; biases may be None. gamma, beta: of plans[0].norm.
    plans: of the products. activation: a _casts.Activation.
    """

    @staticmethod
    @ranged("apex.transformer_engine.MLP.forward")
    def forward(ctx, input, gamma, beta, weight1, bias1, weight2, bias2, plans, activation):
        with in_given_dtypes(input.device.type):
            return _forward(ctx, input, gamma, beta, weight1, bias1, weight2, bias2, plans, activation)

    @staticmethod
    @ranged("apex.transformer_engine.MLP.backward")
    @differentiable_once("an FP8 layer of apex.transformer_engine")
    def backward(ctx, saved, grad):
        matrix, mean, rstd, gamma, beta, u, *products = saved[:-2]
        (w1, w1_scale, x, x_scale), (w2, w2_scale, h, h_scale) = products[:4], products[4:]
        first, second = ctx.plans
        of_input, of_bias1 = any(ctx.needs_input_grad[:3]), ctx.needs_input_grad[4]
        of_weight1, of_weight2 = ctx.needs_input_grad[3], ctx.needs_input_grad[5]
        of_hidden = of_input or of_weight1 or of_bias1
        rows = parts.flat(grad).contiguous()
        bias_dtype = ctx.bias_dtypes[1] if ctx.needs_input_grad[6] else None
        q, bias2 = parts.gradient_and_sum(second, rows, of_hidden, of_weight2, bias_dtype)
        weight1 = bias1 = weight2 = None
        if of_weight2:
            made = parts.of_codes(second, q, h, h_scale, ctx.weight_dtypes[1])
            weight2 = parts.weight_gradient(second, ctx.weights[1], made, ctx.weight_dtypes[1])
        if of_hidden:
            made = product(q.rows, q.row_scale, w2, w2_scale, second.dtype, accurate=second.accurate[1])
            of = ctx.activation._replace(before=u)
            q, bias1 = first.gradient.quantize_and_sum(made, of_input, of_weight1, of_bias1, of)
            bias1 = bias1.to(ctx.bias_dtypes[0]) if of_bias1 else None
        if of_weight1:
            made = parts.of_codes(first, q, x, x_scale, ctx.weight_dtypes[0])
            weight1 = parts.weight_gradient(first, ctx.weights[0], made, ctx.weight_dtypes[0])
        grads = None, None, None
        if of_input:
            dtype = ctx.input_dtype if first.norm is None else first.dtype
            made = product(q.rows, q.row_scale, w1, w1_scale, dtype, accurate=first.accurate[1])
            statistics, of_norm = Statistics(mean, rstd), any(ctx.needs_input_grad[1:3])
            grads = parts.entering(first.norm, made, matrix, statistics, gamma, beta, of_norm)
            grads = parts.shaped(grads[0], grad.shape), *grads[1:]
        return *grads, weight1, bias1, weight2, bias2, None, None


def _forward(ctx, input, gamma, beta, weight1, bias1, weight2, bias2, plans, activation):
    first, second = plans
    of_input, of_weight1, of_weight2 = (any(ctx.needs_input_grad[i:j]) for i, j in ((0, 3), (3, 4), (5, 6)))
    of_hidden = any(ctx.needs_input_grad[:5])
    matrix = parts.flat(input)
    x, statistics = parts.entered(first, matrix, gamma, beta, of_weight1)
    w1 = parts.quantized_weight(first, weight1, of_input)
    bias = parts.of_dtype(bias1, first)
    u = product(x.rows, x.row_scale, w1.rows, w1.row_scale, first.dtype, bias, first.accurate[0])
    h = second.input.quantize(u, True, of_weight2, activation)
    w2 = parts.quantized_weight(second, weight2, of_hidden)
    bias = parts.of_dtype(bias2, second)
    output = product(h.rows, h.row_scale, w2.rows, w2.row_scale, second.dtype, bias, second.accurate[0])
    kept = None if first.norm is None or not of_input else matrix
    ctx.save_for_backward(
        *(kept, *statistics, gamma, beta, u if of_hidden else None),
        *(w1.columns, w1.column_scale, x.columns, x.column_scale),
        *(w2.columns, w2.column_scale, h.columns, h.column_scale),
        *(weight1, weight2),  # as of Linear
    )
    ctx.plans, ctx.activation, ctx.input_dtype = plans, activation, input.dtype
    ctx.weight_dtypes = weight1.dtype, weight2.dtype
    ctx.bias_dtypes = tuple(None if bias is None else bias.dtype for bias in (bias1, bias2))
    ctx.weights = weight1 if first.main_grad else None, weight2 if second.main_grad else None
    return parts.shaped(output, input.shape)
