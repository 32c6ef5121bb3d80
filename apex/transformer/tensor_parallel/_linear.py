"""A linear layer whose backward communicates while it multiplies, and may add to `weight.main_grad`."""

from __future__ import annotations

import torch

from apex._autocast_utils import _cast_if_autocast_enabled
from apex._functional import call, is_autocast_enabled
from apex.fused_dense import _main_grad
from apex.transformer import _collectives as collectives
from apex.transformer.parallel_state import get_tensor_model_parallel_group
from apex.transformer.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from apex.transformer.tensor_parallel.utils import refuse_create_graph

_dense = torch.ops.apex.dense_forward.default
_SEQUENCE = "the parts of a sequence"
_GRADIENT = "the gradient of a layer's input"


class LinearWithGradAccumulationAndAsyncCommunication(torch.autograd.Function):
    """apply(input, weight, bias, gradient_accumulation_fusion, async_grad_allreduce, sequence_parallel_enabled,
    use_16bit_in_wgrad_accum_fusion=False): see linear_with_grad_accumulation_and_async_allreduce.
    """

    @staticmethod
    def forward(
        ctx,
        input,
        weight,
        bias,
        gradient_accumulation_fusion,
        async_grad_allreduce,
        sequence_parallel_enabled,
        use_16bit_in_wgrad_accum_fusion=False,
    ):
        if gradient_accumulation_fusion and weight.requires_grad:
            _main_grad.main_grad_of(weight)
        ctx.weight = weight  # the parameter itself, which has the main_grad
        weight = weight.to(input.dtype)
        ctx.save_for_backward(input, weight)
        ctx.fused, ctx.reduced = gradient_accumulation_fusion, async_grad_allreduce
        ctx.sequence_parallel = sequence_parallel_enabled
        if sequence_parallel_enabled:
            input = collectives.all_gather(input, get_tensor_model_parallel_group(), _SEQUENCE)
        return call("dense", _dense, 1, (input, weight, bias, "none"))

    @staticmethod
    def backward(ctx, grad_output):
        input, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _with_history(ctx, grad_output, input)
        of_input, of_weight, of_bias = ctx.needs_input_grad[:3]
        gathered = pending = grad_input = grad_weight = None
        if ctx.sequence_parallel and of_weight:
            gathered = collectives.start_all_gather(input, get_tensor_model_parallel_group(), _SEQUENCE)
        if of_input:
            grad_input = grad_output.matmul(weight).contiguous()
        if gathered is not None:
            input = gathered.wait()
        if of_input:
            pending = _start_sum(ctx, grad_input)
        rows = grad_output.reshape(-1, grad_output.shape[-1])  # these products run beside the sum
        if of_weight:
            grad_weight = _of_weight(ctx, input.reshape(-1, input.shape[-1]), rows)
        grad_bias = rows.sum(0) if of_bias else None
        if pending is not None:
            grad_input = pending.wait()
        return grad_input, grad_weight, grad_bias, None, None, None, None


def _with_history(ctx, grad_output, input):
    """What backward gives, for create_graph=True: made of what has gradients of its own."""
    if ctx.fused:
        refuse_create_graph("gradient_accumulation_fusion")
    grad_input = grad_output.matmul(ctx.weight.to(grad_output.dtype))
    if ctx.sequence_parallel:
        input = gather_from_sequence_parallel_region(input)
        grad_input = reduce_scatter_to_sequence_parallel_region(grad_input)
    elif ctx.reduced:
        grad_input = reduce_from_tensor_model_parallel_region(grad_input)
    rows = grad_output.reshape(-1, grad_output.shape[-1])
    grad_weight = rows.t().matmul(input.reshape(-1, input.shape[-1]))
    grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
    return grad_input, grad_weight, grad_bias, None, None, None, None


def _start_sum(ctx, grad_input):
    """Starts what sums the gradient of the input over ranks, where anything does."""
    if ctx.sequence_parallel:
        return collectives.start_reduce_scatter(
            grad_input, get_tensor_model_parallel_group(), _GRADIENT, overwrite=True
        )
    if ctx.reduced:
        return collectives.start_all_reduce(grad_input, get_tensor_model_parallel_group(), _GRADIENT)
    return None


def _of_weight(ctx, input, rows):
    """The weight's gradient, or what stands for one that was added to main_grad."""
    return _main_grad.add(ctx.weight, input, rows) if ctx.fused else rows.t().matmul(input)


def linear_with_grad_accumulation_and_async_allreduce(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gradient_accumulation_fusion: bool,
    async_grad_allreduce: bool,
    sequence_parallel_enabled: bool,
) -> torch.Tensor:
    """input weight^T + bias, whose backward communicates beside the product that gives the weight's gradient.

    Args:
        input: [..., inputs]; with sequence parallelism this rank's part of the first dimension.
        weight: [outputs, inputs], of the input's dtype; under autocast both are cast.
        bias: [outputs], or None.
        gradient_accumulation_fusion: the weight's gradient is added to `weight.main_grad`, of its dtype or float32, as
            apex.fused_dense.accumulate_weight_gradient does, and weight.grad stays as it is.
        async_grad_allreduce: the input's gradient is summed over the tensor parallel ranks.
        sequence_parallel_enabled: the input is gathered over the ranks, and each gets its part of the summed gradient.

    Returns:
        [..., outputs], contiguous.

    Raises:
        TypeError, ValueError: dtypes or shapes that do not fit, a weight without main_grad, both of the last options.
    """
    return _linear(
        *(input, weight, bias, gradient_accumulation_fusion, async_grad_allreduce, sequence_parallel_enabled),
        False,
    )


def linear_with_grad_accumulation_and_async_allreduce_in16bit(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gradient_accumulation_fusion: bool,
    async_grad_allreduce: bool,
    sequence_parallel_enabled: bool,
) -> torch.Tensor:
    """The same, of weights whose main_grad is float16 or bfloat16; here each takes what the other does."""
    return _linear(
        *(input, weight, bias, gradient_accumulation_fusion, async_grad_allreduce, sequence_parallel_enabled),
        True,
    )


def _linear(input, weight, bias, fusion, async_allreduce, sequence_parallel, in_16bit):
    if async_allreduce and sequence_parallel:
        raise ValueError("async_grad_allreduce and sequence_parallel_enabled exclude each other")
    if weight.dtype != input.dtype and not is_autocast_enabled(input.device.type):
        raise TypeError(f"the input is {input.dtype}, the weight {weight.dtype}: one dtype is required")
    input, bias = _cast_if_autocast_enabled(input, bias)
    with torch.amp.autocast(input.device.type, enabled=False):
        return LinearWithGradAccumulationAndAsyncCommunication.apply(
            input, weight, bias, fusion, async_allreduce, sequence_parallel, in_16bit
        )
