"""Batch norm by statistics that the caller gathered: what layers of one's own are built of."""

from __future__ import annotations

import torch

from apex._once import differentiable_once
from apex._plain import contiguous
from apex.parallel._batch_statistics import add_up, call, of_running, others_in
from apex.reference import _channels


class SyncBatchnormFunction(torch.autograd.Function):
    """Normalizes by the mean and variance of all ranks' batches, which count as functions of the input in backward.

    One all-reduce in backward, none in forward. The gradients of weight and bias are this rank's.
    """

    @staticmethod
    def forward(ctx, input, weight, bias, running_mean, running_variance, eps, process_group, world_size):
        """As in public apex.

        Args:
            input: [batch, channels, ...].
            weight, bias: [channels], or None.
            running_mean, running_variance: [channels], of all ranks' batches; the variance biased.
            eps: added to the variance.
            process_group: the ranks that share the batch (None: all).
            world_size: how many they are; each is taken to have as many values as this one.

        Raises:
            ValueError: shapes or devices do not fit.
            TypeError: dtypes do not fit.
        """
        given, input = input, contiguous(input, _channels.format_of(input, False))
        mean, inv_std = of_running(running_mean, running_variance, eps, input.dtype)
        ctx.group = others_in(process_group) if world_size > 1 else None
        ctx.values = input.numel() // max(mean.numel(), 1) * world_size
        ctx.save_for_backward(given, weight, bias, mean, inv_std)
        return call("batchnorm_forward", input, None, mean, inv_std, weight, bias, False, False)

    @staticmethod
    @differentiable_once("SyncBatchNorm")
    def backward(ctx, saved, grad_output):
        """Gradients of input, weight and bias."""
        input, weight, bias, mean, inv_std = saved
        input = contiguous(input, _channels.format_of(input, False))
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        affine = bias if weight is None else weight
        sums, grad_weight, grad_bias = call("reduce_bn", grad_output, input, mean, inv_std, affine, False)
        grad_input = None
        if wants_input or ctx.group is not None:  # another rank's input may need a gradient
            sums = add_up(sums, ctx.group)
        if wants_input:
            count = mean.new_full((1,), ctx.values)
            grad_input = call(
                "batchnorm_backward", grad_output, input, mean, inv_std, weight, *sums.chunk(2), count, False
            )
        return (
            grad_input,
            grad_weight if wants_weight else None,
            grad_bias if wants_bias else None,
            *(None,) * 5,
        )
