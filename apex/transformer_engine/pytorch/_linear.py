"""The function behind every layer that multiplies in FP8."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from apex._functional import is_autocast_enabled
from apex._once import differentiable_once, in_given_dtypes
from apex.fused_dense import _main_grad
from apex.transformer_engine.pytorch._norms import Norm, Statistics
from apex.transformer_engine.pytorch._products import product
from apex.transformer_engine.pytorch._quantizers import Quantized
from apex.transformer_engine.pytorch._switches import ranged

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
        norm: by which the input goes first; None: it is quantized as it is.
    """

    input: Any
    weight: Any
    gradient: Any
    cached: Quantized | None
    dtype: torch.dtype
    accurate: tuple[bool, bool, bool]
    wide_wgrad: bool
    main_grad: bool
    norm: Norm | None = None


def output_dtype(input: torch.Tensor) -> torch.dtype:
    """Autocast's, where there is one, else the input's. Raises TypeError for one that FP8 does not go with."""
    kind = input.device.type
    dtype = torch.get_autocast_dtype(kind) if is_autocast_enabled(kind) else input.dtype
    if dtype not in _DTYPES:
        raise TypeError(f"FP8 layers take float32, float16 and bfloat16, not {dtype}")
    return dtype


class Linear(torch.autograd.Function):
    """apply(input, gamma, beta, weight, bias, plan): input weight^T + bias, of quantized values.

    input [..., inputs], weight [outputs, inputs], bias [outputs] or None. gamma, beta [inputs], or None: of plan.norm,
    by which rows of the input go first.
    """

    @staticmethod
    @ranged("apex.transformer_engine.Linear.forward")
    def forward(ctx, input, gamma, beta, weight, bias, plan):
        with in_given_dtypes(input.device.type):
            return _forward(ctx, input, gamma, beta, weight, bias, plan)

    @staticmethod
    @ranged("apex.transformer_engine.Linear.backward")
    @differentiable_once("an FP8 layer of apex.transformer_engine")
    def backward(ctx, saved, grad):
        needed, plan = ctx.needs_input_grad, ctx.plan
        matrix, mean, rstd, gamma, beta, wide, w_columns, w_scale, x_columns, x_scale, _ = saved
        of_input, (of_weight, of_bias) = any(needed[:3]), needed[3:5]
        rows = flat(grad).contiguous()
        q, grad_bias = gradient_and_sum(plan, rows, of_input, of_weight, ctx.bias_dtype if of_bias else None)
        grads = None, None, None
        if of_input:
            dtype = ctx.input_dtype if plan.norm is None else plan.dtype
            made = product(q.rows, q.row_scale, w_columns, w_scale, dtype, accurate=plan.accurate[1])
            grads = entering(plan.norm, made, matrix, Statistics(mean, rstd), gamma, beta, any(needed[1:3]))
            grads = shaped(grads[0], grad.shape), *grads[1:]
        grad_weight = None
        if of_weight and plan.wide_wgrad:
            made = rows.t().to(wide.dtype).matmul(wide)
            grad_weight = weight_gradient(plan, ctx.weight, made, ctx.weight_dtype)
        elif of_weight:
            made = of_codes(plan, q, x_columns, x_scale, ctx.weight_dtype)
            grad_weight = weight_gradient(plan, ctx.weight, made, ctx.weight_dtype)
        return *grads, grad_weight, grad_bias, None


def _forward(ctx, input, gamma, beta, weight, bias, plan):
    of_input, of_weight = any(ctx.needs_input_grad[:3]), ctx.needs_input_grad[3]
    matrix = flat(input)
    x, statistics = entered(plan, matrix, gamma, beta, of_weight and not plan.wide_wgrad)
    w = quantized_weight(plan, weight, of_input)
    output = product(
        x.rows, x.row_scale, w.rows, w.row_scale, plan.dtype, of_dtype(bias, plan), plan.accurate[0]
    )
    wide = matrix.to(plan.dtype) if of_weight and plan.wide_wgrad else None
    kept = None if plan.norm is None or not of_input else matrix
    # The weight is saved for who asks for a second derivative, which is refused where something here has a gradient.
    ctx.save_for_backward(
        *(kept, *statistics, gamma, beta, wide, w.columns, w.column_scale, x.columns, x.column_scale, weight)
    )
    ctx.plan, ctx.input_dtype, ctx.weight_dtype = plan, input.dtype, weight.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.weight = weight if plan.main_grad else None
    return shaped(output, input.shape)


# ---- parts of products, of one layer or of two one behind the other --------------------------------------------------


def entered(plan, matrix, gamma, beta, columns):
    """(what a product takes, the norm's Statistics or two Nones) of a matrix, by the plan's norm where it has one."""
    if plan.norm is None:
        return plan.input.quantize(matrix, True, columns), (None, None)
    return plan.norm.quantize(plan.input, matrix, gamma, beta, columns)


def quantized_weight(plan, weight, columns):
    """The weight in FP8: of an earlier call, where there is one."""
    return plan.weight.quantize(weight, True, columns) if plan.cached is None else plan.cached


def of_dtype(bias, plan):
    """A bias as the product adds it."""
    return bias if bias is None or bias.dtype == plan.dtype else bias.to(plan.dtype)


def gradient_and_sum(plan, rows, of_input, of_weight, bias_dtype):
    """(the gradient of the output in FP8, or None where nobody wants it; the bias's, of bias_dtype, None without it).

    The bias's is made by the same pass where it loses nothing there: a sum of halves is a half.
    """
    narrow = of_weight and not plan.wide_wgrad
    q = total = None
    if of_input or narrow:
        q, total = plan.gradient.quantize_and_sum(rows, of_input, narrow, bias_dtype == rows.dtype)
    if bias_dtype is not None and total is None:
        total = rows.sum(0, dtype=torch.float32)
    return q, total if bias_dtype is None or total.dtype == bias_dtype else total.to(bias_dtype)


def of_codes(plan, q, columns, scale, dtype):
    """A weight's gradient, in float32 where main_grad takes it."""
    dtype = torch.float32 if plan.main_grad else dtype
    return product(q.columns, q.column_scale, columns, scale, dtype, accurate=plan.accurate[2])


def weight_gradient(plan, weight, made, dtype):
    """What autograd is given for it; `weight` is there where main_grad takes it."""
    if plan.main_grad:
        return _main_grad.add_made(weight, made)
    return made if made.dtype == dtype else made.to(dtype)


def entering(norm, grad, matrix, statistics, gamma, beta, of_parameters):
    """Gradients of (the input, gamma, beta) from that of what a product took."""
    if norm is None:
        return grad, None, None
    return norm.gradients(grad, matrix, statistics, gamma, beta, of_parameters)


def shaped(matrix, like):
    """With the leading dimensions of a shape. No view to autograd: what it is of is nobody's else."""
    if len(like) == 2:
        return matrix
    return torch.ops.aten._unsafe_view.default(matrix, [*like[:-1], matrix.shape[1]])


def flat(tensor):
    """[rows, columns] of [..., columns]."""
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])
