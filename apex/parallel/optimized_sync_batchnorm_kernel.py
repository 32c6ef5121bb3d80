"""Batch norm over the batches of several ranks, as an autograd function."""

from __future__ import annotations

import torch

from apex import _functional
from apex._loader import library
from apex._once import differentiable_once
from apex._plain import contiguous
from apex.parallel._batch_statistics import add_up, call, of_batch, of_running, others_in
from apex.reference import _channels

_layer = _functional.entry("sync_batch_norm_layer")


class SyncBatchnormFunction(torch.autograd.Function):
    """One all-gather in forward, one all-reduce in backward; nothing waits on the host.

    The all-reduce is there whether this rank's input needs a gradient or not: that of another rank may.

    The gradients of weight and bias are this rank's, as those of any layer: DistributedDataParallel adds them up.
    """

    @staticmethod
    def forward(
        ctx,
        input,
        z,
        weight,
        bias,
        running_mean,
        running_variance,
        eps,
        track_running_stats=True,
        momentum=1.0,
        process_group=None,
        channel_last=False,
        fuse_relu=False,
        num_batches_tracked=None,
        synchronize=True,
    ):
        """Up to fuse_relu as in public apex.

        Args:
            input: [batch, channels, ...], in any memory format, or with channel_last [..., channels].
            z: as the input: added before the ReLU. Or None.
            weight, bias: [channels], or None.
            running_mean, running_variance: [channels]. With batch statistics they are brought up to date, or None.
            track_running_stats: normalize by the statistics of the batch; else by running_mean and running_variance.
            momentum: share of the batch in the new running statistics.
            num_batches_tracked: int64 tensor; if given, running statistics are the plain average over so many batches.
            synchronize: whether the other ranks of process_group (None: all) take part.

        Raises:
            ValueError: shapes or devices do not fit; one value a channel and no other rank.
            TypeError: dtypes do not fit.
        """
        ctx.group = None
        # Once, not in each of the passes. What is kept is the input itself: a copy has no history.
        given, input = input, contiguous(input, _channels.format_of(input, channel_last))
        count = None
        if track_running_stats:
            ctx.group = others_in(process_group) if synchronize else None
            mean, inv_std, count = of_batch(
                input,
                channel_last,
                ctx.group,
                eps,
                running_mean,
                running_variance,
                momentum,
                num_batches_tracked,
            )
        else:
            mean, inv_std = of_running(running_mean, running_variance, eps, input.dtype)
        ctx.channel_last = channel_last
        ctx.fuse_relu = fuse_relu
        ctx.save_for_backward(given, z, weight, bias, mean, inv_std, count)
        return call("batchnorm_forward", input, z, mean, inv_std, weight, bias, fuse_relu, channel_last)

    @staticmethod
    @differentiable_once("SyncBatchNorm")
    def backward(ctx, saved, grad_output):
        """Gradients of input, z, weight and bias."""
        input, z, weight, bias, mean, inv_std, count = saved
        wants_input, wants_z, wants_weight, wants_bias = ctx.needs_input_grad[:4]
        last = ctx.channel_last
        input = contiguous(input, _channels.format_of(input, last))
        grad_input = grad_weight = grad_bias = None
        if ctx.fuse_relu:
            grad_output = call("relu_bw", grad_output, input, z, mean, inv_std, weight, bias, last)
        sums = None
        if wants_weight or wants_bias or ctx.group is not None or (wants_input and count is not None):
            affine = bias if weight is None else weight
            sums, grad_weight, grad_bias = call("reduce_bn", grad_output, input, mean, inv_std, affine, last)
        if count is not None and (wants_input or ctx.group is not None):
            sums = add_up(sums, ctx.group)
        if wants_input:
            of_dy = of_dy_xmu = None
            if count is not None:
                of_dy, of_dy_xmu = sums.chunk(2)
            grad_input = call(
                "batchnorm_backward", grad_output, input, mean, inv_std, weight, of_dy, of_dy_xmu, count, last
            )
        return (
            grad_input,
            grad_output if wants_z else None,
            grad_weight if wants_weight else None,
            grad_bias if wants_bias else None,
            *(None,) * 10,
        )


def batch_norm(
    input,
    z,
    weight,
    bias,
    running_mean,
    running_variance,
    eps,
    use_batch,
    momentum,
    group,
    channel_last,
    relu,
    batches,
):
    """SyncBatchnormFunction; straight in C++, in less time, where nothing traces and nobody else is in the group.

    Args:
        group: the other ranks are in it; None: there are none.
        relu, batches: fuse_relu and num_batches_tracked of the function.
    """
    if (
        group is not None
        or _layer is None
        or _functional.is_traced()
        or torch._C._are_functorch_transforms_active()
        or torch.overrides.has_torch_function((input, z, weight, bias, running_mean, running_variance))
    ):
        return SyncBatchnormFunction.apply(
            input, z, weight, bias, running_mean, running_variance, eps, use_batch, momentum, group, channel_last, relu,
            batches, group is not None,
        )  # fmt: skip
    try:
        return _layer(
            input, z, weight, bias, running_mean, running_variance, batches, momentum, eps, relu, use_batch,
            channel_last,
        )  # fmt: skip
    except RuntimeError as error:
        library.raise_stored(error)  # the probe's own exception, if it refused to choose
        raise
