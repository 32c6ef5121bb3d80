"""Batch norm of NHWC tensors with an addition and a ReLU, whose mask is kept as bits, in plain PyTorch."""

import torch

from apex.reference import _channels
from apex.reference.batchnorm import batchnorm_backward

# No functional pair: between the statistics of a rank and the output lies a collective, so the autograd function is
# in Python (apex/contrib/groupbn).
PAIRS = ()


def _format(input, channel_last):
    """Of outputs: NHWC in memory."""
    return torch.contiguous_format if channel_last or input.dim() == 2 else torch.channels_last


def groupbn_forward(
    input,
    z,
    mean,
    inv_std,
    weight=None,
    shift=None,
    fuse_relu=False,
    make_bitmask=False,
    channel_last=False,
):
    """(output, bitmask): (input - mean) * inv_std * weight + shift + z, and with fuse_relu its positive part.

    input: float16, bfloat16, float32 or float64, [..., channels] with channel_last, else [batch, channels, height,
    width]. Other tensors as in batchnorm_forward. output: of the input's shape and dtype, contiguous, or without
    channel_last in torch.channels_last. bitmask: uint8, [ceil(elements / 8)], with bit i % 8 of byte i // 8 set
    where element i of the output's memory is positive or nan; without elements if make_bitmask is not set.
    Raises ValueError and TypeError.
    """
    op = "groupbn_forward"
    _channels.check_input(op, input)
    _channels.check_nhwc(op, input, channel_last)
    if make_bitmask and not fuse_relu:
        raise ValueError(f"{op}: a bitmask says what a ReLU let through: make_bitmask needs fuse_relu")
    affine = (("weight", weight), ("bias", shift))
    statistics = (("mean", mean), ("inv_std", inv_std))
    _channels.check(op, input, channel_last, statistics=statistics, affine=affine, like=(("z", z),))
    y = _channels.normalized(input, z, mean, inv_std, weight, shift, channel_last)
    bitmask = input.new_empty(0, dtype=torch.uint8)
    if make_bitmask:
        bitmask = _channels.pack(~(y <= 0), channel_last)
    y = y.relu() if fuse_relu else y
    return _channels.output(y, input, channel_last, _format(input, channel_last)), bitmask


def groupbn_backward(
    grad_output,
    input,
    bitmask,
    mean,
    inv_std,
    weight=None,
    sum_dy=None,
    sum_dy_xmu=None,
    count=None,
    of_z=False,
    channel_last=False,
):
    """(grad_input, grad_z): batchnorm_backward of dy, and dy, which is grad_output where the mask's bit is set, else 0.

    bitmask: groupbn_forward's, or None: every bit set. sum_dy, sum_dy_xmu: of reduce_bn with that mask. grad_z has no
    elements if of_z is not set. Tensors and layouts as in groupbn_forward and batchnorm_backward.
    """
    op = "groupbn_backward"
    _channels.check_input(op, input)
    _channels.check_nhwc(op, input, channel_last)
    _channels.check_bitmask(op, bitmask, input)
    _channels.check(op, input, channel_last, like=(("grad_output", grad_output),))
    if bitmask is not None:
        grad_output = grad_output.masked_fill(~_channels.unpack(bitmask, input, channel_last), 0)
    format = _format(input, channel_last)
    grad_z = input.new_empty(0)
    if of_z:
        grad_z = _channels.output(grad_output, input, channel_last, format)
    grad_input = batchnorm_backward(
        grad_output, input, mean, inv_std, weight, sum_dy, sum_dy_xmu, count, channel_last
    )
    return grad_input.contiguous(memory_format=format), grad_z
