"""Batch norm of NHWC tensors with an addition and a ReLU in the same pass, as an autograd function."""

from __future__ import annotations

import torch

from apex import _functional
from apex._loader import library
from apex._once import differentiable_once
from apex._plain import contiguous
from apex.parallel._batch_statistics import add_up, call, of_batch, of_running

_layer = _functional.entry("group_batch_norm_layer")


def is_channel_last(name, x, channels, torch_channels_last=False):
    """Whether the channels are the last dimension, rather than the second one of four.

    Public apex takes [N, H, W, C], and [N, C, H, W] in torch.channels_last.

    torch_channels_last: they are the second one, and the tensor may have any memory format.

    Raises:
        ValueError: the shape has no place for so many channels.
    """
    second = x.dim() == 4 and x.size(1) == channels
    if torch_channels_last:
        if second:
            return False
        wanted = f"[N, {channels}, H, W], as torch_channels_last says"
    else:
        if second and x.is_contiguous(memory_format=torch.channels_last):
            return False
        if x.dim() == 4 and x.size(3) == channels:
            return True
        wanted = f"[N, H, W, {channels}], or [N, {channels}, H, W] in torch.channels_last"
    raise ValueError(
        f"{name}: the input must be {wanted}; its shape is {list(x.shape)}, its strides {list(x.stride())}"
    )


def check(name, x, z, per_channel, called="z"):
    """Raises ValueError or TypeError before anything is counted or sent: for z, which a message calls `called`, and for
    weights and statistics."""
    if z is not None and (z.shape != x.shape or z.device != x.device):
        raise ValueError(
            f"{name}: {called} must be as x, {list(x.shape)} on {x.device}, not {list(z.shape)} on {z.device}"
        )
    if z is not None and z.dtype != x.dtype:
        raise TypeError(f"{name}: {called} has dtype {z.dtype}, but x {x.dtype}")
    for tensor in per_channel:
        if tensor is None:
            continue
        if tensor.device != x.device:
            raise ValueError(
                f"{name}: x is on {x.device}, but parameters or statistics are on {tensor.device}"
            )
        if (tensor.dtype == torch.float64) != (x.dtype == torch.float64):
            raise TypeError(
                f"{name}: float64 goes with float64 alone: x is {x.dtype}, parameters or statistics {tensor.dtype}"
            )


def gradients(grad_output, x, bitmask, weight, bias, mean, inv_std, count, group, channel_last, wants):
    """Gradients of (x, z, weight, bias), None where `wants` says that nobody wants one.

    Those of weight and bias are averages over the ranks of the group, as in public apex.

    Args:
        grad_output: as x.
        bitmask: what the ReLU let through (groupbn_forward); None: everything.
        mean, inv_std, count: of_batch's; a count of None: the statistics are constants (eval mode).
        group: the ranks that share them, or None.
        wants: four bools.
    """
    wants_x, wants_z, wants_weight, wants_bias = wants
    affine = weight if bias is None else bias if weight is None else weight
    of_dy = of_dy_xmu = grad_x = grad_z = grad_weight = grad_bias = None
    if wants_weight or wants_bias or group is not None or (wants_x and count is not None):
        of_rank = affine if group is None else None
        sums, grad_weight, grad_bias = call(
            "reduce_bn", grad_output, x, mean, inv_std, of_rank, channel_last, bitmask
        )
        if group is not None:
            sums = add_up(sums, group)
            if wants_weight or wants_bias:
                averages = sums.view(2, -1) / torch.distributed.get_world_size(group)
                grad_weight, grad_bias = (
                    (averages[1] * inv_std).to(affine.dtype),
                    averages[0].to(affine.dtype),
                )
        if count is not None:
            of_dy, of_dy_xmu = sums.chunk(2)
    if wants_x or (wants_z and bitmask is not None):
        grad_x, grad_z = call(
            "groupbn_backward",
            grad_output,
            x,
            bitmask,
            mean,
            inv_std,
            weight,
            of_dy,
            of_dy_xmu,
            None if of_dy is None else count,
            wants_z and bitmask is not None,
            channel_last,
        )
    if wants_z and bitmask is None:
        grad_z = grad_output
    return tuple(
        gradient if wanted else None
        for gradient, wanted in zip((grad_x, grad_z, grad_weight, grad_bias), wants, strict=True)
    )


def _in_channels_last(x, channel_last):
    return x if channel_last or x.dim() != 4 else contiguous(x, torch.channels_last)


class GroupBatchNormFunction(torch.autograd.Function):
    """In a group one all-gather in forward and one all-reduce in backward; nothing waits on the host."""

    @staticmethod
    def forward(
        ctx,
        x,
        z,
        weight,
        bias,
        running_mean,
        running_var,
        momentum,
        eps,
        fuse_relu,
        use_batch,
        channel_last,
        group=None,
        batches=None,
    ):
        """(output, mean, 1 / standard deviation).

        Args:
            x: [..., channels] with channel_last, else [batch, channels, height, width], best in torch.channels_last.
            z: as x: added before the ReLU. Or None.
            weight, bias: [channels], or None.
            running_mean, running_var: [channels]. With batch statistics they are brought up to date, or None.
            momentum: share of the batch in the new running statistics.
            fuse_relu: the positive part alone.
            use_batch: normalize by the batch; else by running_mean and running_var.
            group: process group whose ranks' batches count as one; None: this rank's alone.
            batches: int64 tensor; if given, running statistics are the plain average over so many batches.

        Raises:
            ValueError: shapes or devices do not fit; one value a channel, and no other rank.
            TypeError: dtypes do not fit.
        """
        check("batch norm", x, z, (weight, bias, running_mean, running_var))
        # Once, not in each of the passes. What is kept is x itself: a copy has no history.
        given, x = x, _in_channels_last(x, channel_last)
        count = None
        if use_batch:
            mean, inv_std, count = of_batch(
                x, channel_last, group, eps, running_mean, running_var, momentum, batches
            )
        else:
            mean, inv_std = of_running(running_mean, running_var, eps, x.dtype)
        differentiable = any(ctx.needs_input_grad[:4])
        y, bitmask = call(
            "groupbn_forward", x, z, mean, inv_std, weight, bias, fuse_relu, fuse_relu and differentiable, channel_last
        )  # fmt: skip
        ctx.channel_last, ctx.group = channel_last, group if use_batch else None
        ctx.save_for_backward(given, bitmask if fuse_relu else None, weight, bias, mean, inv_std, count)
        ctx.mark_non_differentiable(mean, inv_std)
        ctx.set_materialize_grads(False)
        return y, mean, inv_std

    @staticmethod
    @differentiable_once("batch norm")
    def backward(ctx, saved, grad_output, *_):
        """Gradients of x, z, weight and bias."""
        if grad_output is None:
            return (None,) * 13
        x, bitmask, weight, bias, mean, inv_std, count = saved
        x = _in_channels_last(x, ctx.channel_last)
        found = gradients(
            grad_output, x, bitmask, weight, bias, mean, inv_std, count, ctx.group, ctx.channel_last,
            ctx.needs_input_grad[:4],
        )  # fmt: skip
        return *found, *(None,) * 9


def layer(
    x,
    z,
    weight,
    bias,
    running_mean,
    running_var,
    momentum,
    eps,
    fuse_relu,
    use_batch,
    channel_last,
    group=None,
    batches=None,
):
    """GroupBatchNormFunction; straight in C++, in less time, where nothing traces and there is no group.

    Raises NotImplementedError under transforms of torch.func, which would see the first derivative alone.
    """
    tensors = (x, z, weight, bias, running_mean, running_var)
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "apex batch norm: transforms of torch.func are not implemented; torch.nn.BatchNorm2d and SyncBatchNorm "
            "in eval mode have them"
        )
    if not channel_last and x.requires_grad and x.dim() == 4 and x.layout is torch.strided:
        # Here, where it is recorded: a second derivative that is refused must be one of x, not of a copy.
        x = contiguous(x, torch.channels_last)
        tensors = (x, *tensors[1:])
    if (
        group is not None
        or _layer is None
        or torch.compiler.is_compiling()
        or torch.overrides.has_torch_function(tensors)
    ):
        return GroupBatchNormFunction.apply(
            *tensors, momentum, eps, fuse_relu, use_batch, channel_last, group, batches
        )
    try:
        return _layer(*tensors, batches, momentum, eps, fuse_relu, use_batch, channel_last)
    except RuntimeError as error:
        library.raise_stored(error)  # the probe's own exception, if it refused to choose
        raise
