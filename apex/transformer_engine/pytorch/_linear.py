"""The function behind every layer that multiplies in FP8."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from apex._functional import is_autocast_enabled
from apex._once import differentiable_once, in_given_dtypes
from apex.fused_dense import _main_grad
from apex.transformer_engine.pytorch._products import product
from apex.transformer_engine.pytorch._quantizers import Quantized

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclasses.dataclass
class Plan:
    """How one product and its gradients are made: of the input, the weight and the gradient of the output.

    Args:
        input, weight, gradient: they quantize.
        cached: the weight as FP8, from an earlier call; None: it is quantized anew.
        dtype: of the output.
        accurate: of the product, of the input's and of the weight's gradient: no fast sums.
        wide_wgrad: the weight's gradient is made without FP8.
        main_grad: the weight's gradient is added to its main_grad.
    """

    input: Any
    weight: Any
    gradient: Any
    cached: Quantized | None
    dtype: torch.dtype
    accurate: tuple[bool, bool, bool]
    wide_wgrad: bool
    main_grad: bool


def output_dtype(input: torch.Tensor) -> torch.dtype:
    """Autocast's, where there is one, else the input's. Raises TypeError for one that FP8 does not go with."""
    kind = input.device.type
    dtype = torch.get_autocast_dtype(kind) if is_autocast_enabled(kind) else input.dtype
    if dtype not in _DTYPES:
        raise TypeError(f"FP8 layers take float32, float16 and bfloat16, not {dtype}")
    return dtype


class Linear(torch.autograd.Function):
    """apply(input, weight, bias, plan): input weight^T + bias, of quantized values.

    input [..., inputs], weight [outputs, inputs], bias [outputs] or None.
    """

    @staticmethod
    def forward(ctx, input, weight, bias, plan):
        with in_given_dtypes(input.device.type):
            return _forward(ctx, input, weight, bias, plan)

    @staticmethod
    @differentiable_once("an FP8 layer of apex.transformer_engine")
    def backward(ctx, saved, grad):
        of_input, of_weight, of_bias = ctx.needs_input_grad[:3]
        wide, weights, inputs = saved[0], saved[1:3], saved[3:5]
        plan, rows = ctx.plan, grad.reshape(-1, grad.shape[-1]).contiguous()
        narrow_wgrad = of_weight and not plan.wide_wgrad
        grad_input = grad_weight = None
        q = plan.gradient.quantize(rows, of_input, narrow_wgrad) if of_input or narrow_wgrad else None
        if of_input:
            grad_input = product(q.rows, q.row_scale, *weights, ctx.input_dtype, accurate=plan.accurate[1])
            grad_input = _shaped(grad_input, grad.shape)
        if of_weight:
            dtype = torch.float32 if plan.main_grad else ctx.weight_dtype
            if narrow_wgrad:
                made = product(q.columns, q.column_scale, *inputs, dtype, accurate=plan.accurate[2])
            else:
                made = rows.t().to(wide.dtype).matmul(wide).to(dtype)
            grad_weight = _main_grad.add_made(ctx.weight, made) if plan.main_grad else made
        grad_bias = rows.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if of_bias else None
        return grad_input, grad_weight, grad_bias, None


def _forward(ctx, input, weight, bias, plan):
    of_input, of_weight = ctx.needs_input_grad[:2]
    matrix = input.reshape(-1, input.shape[-1])
    x = plan.input.quantize(matrix, True, of_weight and not plan.wide_wgrad)
    w = plan.cached
    if w is None:
        w = plan.weight.quantize(weight, True, of_input)
    bias_in = None if bias is None else bias.to(plan.dtype)
    output = product(x.rows, x.row_scale, w.rows, w.row_scale, plan.dtype, bias_in, plan.accurate[0])
    wide = matrix.to(plan.dtype) if of_weight and plan.wide_wgrad else None
    # The weight is saved for who asks for a second derivative, which is refused where something here has a gradient.
    ctx.save_for_backward(wide, w.columns, w.column_scale, x.columns, x.column_scale, weight)
    ctx.plan, ctx.input_dtype, ctx.weight_dtype = plan, input.dtype, weight.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    if plan.main_grad:
        ctx.weight = weight
    return _shaped(output, input.shape)


def _shaped(matrix, like):
    """With the leading dimensions of a shape. No view to autograd: what it is of is nobody's else."""
    return torch.ops.aten._unsafe_view.default(matrix, [*like[:-1], matrix.shape[1]])
