"""Batch norm over the batches of several ranks, as an autograd function."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from apex import _functional
from apex._loader import bindings
from apex.reference import _channels

bindings.load()


def _call(name, *arguments):
    """The op's results; arguments in the order of its schema."""
    return _functional.call(name, getattr(torch.ops.apex, name).default, None, arguments)


def _group(process_group):
    """The ranks to speak with, or None where there is nobody else."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if process_group is None else process_group
    return group if dist.get_world_size(group) > 1 else None


def _gather(statistics, group):
    """[ranks, numbers], every rank's."""
    if torch.compiler.is_compiling():
        from torch.distributed import _functional_collectives as functional

        return functional.all_gather_tensor(statistics.unsqueeze(0), 0, group)
    gathered = statistics.new_empty(dist.get_world_size(group), statistics.numel())
    if dist.get_backend(group) == "gloo":  # before torch 2.9 it has no all_gather_into_tensor
        dist.all_gather(list(gathered.unbind(0)), statistics, group=group)
    else:
        dist.all_gather_into_tensor(gathered, statistics, group=group)
    return gathered


def _add_up(sums, group):
    if torch.compiler.is_compiling():
        from torch.distributed import _functional_collectives as functional

        return functional.all_reduce(sums, "sum", group)
    dist.all_reduce(sums, group=group)
    return sums


class SyncBatchnormFunction(torch.autograd.Function):
    """One all-gather in forward, one all-reduce in backward; nothing waits on the host.

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
        ctx.group = ctx.count = None
        # Once, not in each of the passes.
        input = input.contiguous(memory_format=_channels.format_of(input, channel_last))
        count = None
        if track_running_stats:
            group = _group(process_group) if synchronize else None
            statistics = _call("welford_mean_var", input, channel_last)
            channels = statistics.numel() // 2
            if group is None:
                if input.numel() == channels:
                    raise ValueError(
                        f"Expected more than 1 value per channel when training, got input size {input.size()}"
                    )
                gathered = statistics.unsqueeze(0)
            else:
                gathered = _gather(statistics, group)
            mean, _, inv_std, count = _call(
                "welford_parallel",
                gathered[:, :channels],
                gathered[:, channels : 2 * channels],
                gathered[:, 2 * channels],
                eps,
                running_mean,
                running_variance,
                momentum,
                num_batches_tracked,
            )
            ctx.group = group
        else:
            math = torch.float64 if input.dtype == torch.float64 else torch.float32
            mean = running_mean.to(math)
            inv_std = torch.rsqrt(running_variance.to(math) + eps)
        ctx.channel_last = channel_last
        ctx.fuse_relu = fuse_relu
        ctx.save_for_backward(input, z, weight, bias, mean, inv_std, count)
        return _call("batchnorm_forward", input, z, mean, inv_std, weight, bias, fuse_relu, channel_last)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        """Gradients of input, z, weight and bias."""
        input, z, weight, bias, mean, inv_std, count = ctx.saved_tensors
        wants_input, wants_z, wants_weight, wants_bias = ctx.needs_input_grad[:4]
        last = ctx.channel_last
        grad_input = grad_weight = grad_bias = None
        if ctx.fuse_relu:
            grad_output = _call("relu_bw", grad_output, input, z, mean, inv_std, weight, bias, last)
        sums = None
        if wants_weight or wants_bias or (wants_input and count is not None):
            affine = bias if weight is None else weight
            sums, grad_weight, grad_bias = _call("reduce_bn", grad_output, input, mean, inv_std, affine, last)
        if wants_input:
            of_dy = of_dy_xmu = None
            if count is not None:
                if ctx.group is not None:
                    sums = _add_up(sums, ctx.group)
                of_dy, of_dy_xmu = sums.chunk(2)
            grad_input = _call(
                "batchnorm_backward", grad_output, input, mean, inv_std, weight, of_dy, of_dy_xmu, count, last
            )
        return (
            grad_input,
            grad_output if wants_z else None,
            grad_weight if wants_weight else None,
            grad_bias if wants_bias else None,
            *(None,) * 10,
        )
