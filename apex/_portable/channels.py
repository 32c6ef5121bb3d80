"""The ops of batch norm: csrc/bindings/{channel,batchnorm,reduce_bn,relu_bw,groupbn,welford_*}.h in Python.

They are no functional pairs: between the statistics of a rank and the output lies a collective, so the whole is an
autograd function in Python (apex/parallel) over these.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from apex._portable import interface, tensors, workspace
from apex._portable.checks import affine, like, type_, value
from apex._portable.functional import kernel
from apex._portable.tensors import address, code_of, contiguous, math_type

_LAST = ((4, torch.channels_last), (5, torch.channels_last_3d))
_SHAPE = ("channels", "batch", "spatial", "channels_last", "input_type", "weight_type")
_apply = interface.layout("ChannelApply").packer(
    *_SHAPE, "input", "grad_output", "z", "mean", "inv_std", "weight", "shift", "output", "relu", "bitmask", "grad_z",
    "sum_dy", "sum_dy_xmu", "count", "counts", "count_is_int",
)  # fmt: skip
_reduce = interface.layout("ChannelReduce").packer(
    *_SHAPE, "input", "sums", "grad_output", "mean", "inv_std", "bitmask", "grad_weight", "grad_bias"
)
_c_moments, _c_sums = interface.function("apex_welford_mean_var"), interface.function("apex_reduce_bn")


class _Channels(NamedTuple):
    """Where the channels are: the last dimension, or else the second one, whatever their order in memory."""

    size: int
    format: torch.memory_format  # of the input as kernels read it, and of outputs
    last_in_memory: bool
    math: torch.dtype  # of statistics


def _channels_of(op, input, channel_last, nhwc=False):
    dims = input.dim()
    value(dims >= 2, "{}: the input has {} dimensions; it must have at least 2, batch and channels", op, dims)
    code_of(op, input.dtype)
    last, format = channel_last or dims == 2, torch.contiguous_format
    count = input.shape[-1 if last else 1]
    if not last and not input.is_contiguous():
        for wanted, dense in _LAST:
            if dims == wanted and input.is_contiguous(memory_format=dense):
                last, format = True, dense
    if nhwc and not last:
        value(
            dims == 4,
            "{}: the input has {} dimensions; without channel_last it must have 4, [batch, channels, height, width]",
            op, dims,
        )  # fmt: skip
        last, format = True, torch.channels_last
    return _Channels(count, format, last, math_type(input.dtype))


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_like_input(op, name, tensor, input):
    like(op, name, tensor, input.shape, input.dtype, "the input's ")


def _check_statistic(op, name, tensor, channels):
    like(op, name, tensor, (channels.size,), channels.math)


def _check_statistics(op, channels, **given):
    """Of mean and inv_std; the dispatcher passes None for a tensor that an op needs, too."""
    for name, tensor in given.items():
        type_(tensor is not None, "{}: {} must be a tensor, not None", op, name)
        _check_statistic(op, name, tensor, channels)


def _check_gradient(op, grad, input):
    type_(grad is not None, "{}: grad_output must be a tensor, not None", op)
    _check_like_input(op, "grad_output", grad, input)


def _check_normalization(op, input, channels, z, mean, inv_std, weight, shift):
    _check_statistics(op, channels, mean=mean, inv_std=inv_std)
    _check_like_input(op, "z", z, input)
    affine(op, weight, shift, input, channels.size)


def _check_bitmask(op, bitmask, input):
    if bitmask is None:
        return
    wanted = (input.numel() + 7) // 8
    type_(bitmask.dtype is torch.uint8, "{}: bitmask must be uint8, not {}", op, bitmask.dtype)
    value(
        bitmask.shape == (wanted,),
        "{}: bitmask must hold {} bytes, a bit for each element, not {}", op, wanted, bitmask.shape,
    )  # fmt: skip


def _check_sums(op, input, channels, sum_dy, sum_dy_xmu, count):
    _check_statistic(op, "sum_dy", sum_dy, channels)
    _check_statistic(op, "sum_dy_xmu", sum_dy_xmu, channels)
    value(
        (sum_dy is None) == (sum_dy_xmu is None) == (count is None),
        "{}: sum_dy, sum_dy_xmu and count come together, or not at all", op,
    )  # fmt: skip
    if count is not None:
        type_(
            count.dtype in (torch.int32, channels.math), "{}: count must be int32 or {}, not {}",
            op, channels.math, count.dtype,
        )  # fmt: skip


# ---- launches --------------------------------------------------------------------------------------------------------


def _shape_of(op, x, channels, weight):
    """[batch][channels][spatial], or rows of channels: the fields _SHAPE."""
    count, batch = channels.size, x.shape[0]
    spatial = x.numel() // (batch * count) if batch and count else 0
    # One element a channel and image: the same memory either way.
    last = channels.last_in_memory or spatial == 1
    if last:
        batch, spatial = x.numel() // count if count else 0, 1
    code = code_of(op, x.dtype)
    return count, batch, spatial, last, code, code if weight is None else code_of(op, weight.dtype)


def _in_format(tensor, format):
    return None if tensor is None else tensor.contiguous(memory_format=format)


def _output_like(input, channels):
    return torch.empty(input.shape, dtype=input.dtype, device=input.device, memory_format=channels.format)


def _run_apply(op, channels, input, mean, inv_std, *, grad=None, z=None, weight=None, shift=None, relu=False,
               bitmask=None, grad_z=None, sums=(None, None, None)):  # fmt: skip
    """The output of a pass over all elements; None: the reference must run."""
    place = tensors.place_of(input)
    if place is None:
        return None
    x = _in_format(input, channels.format)
    dy, more = _in_format(grad, channels.format), _in_format(z, channels.format)
    m, r, w, s = contiguous(mean), contiguous(inv_std), contiguous(weight), contiguous(shift)
    of_dy, of_dy_xmu, count = map(contiguous, sums)
    output = _output_like(input, channels)
    packed = _apply(
        *_shape_of(op, x, channels, w if w is not None else s), x.data_ptr(), address(dy), address(more), m.data_ptr(),
        r.data_ptr(), address(w), address(s), output.data_ptr(), relu, address(bitmask), address(grad_z),
        address(of_dy), address(of_dy_xmu), address(count), 0 if count is None else count.numel(),
        count is not None and count.dtype is torch.int32,
    )  # fmt: skip
    status = interface.function(f"apex_{op}")(place, packed)
    return None if status and tensors.must_use_reference(status, op) else output


# ---- ops -------------------------------------------------------------------------------------------------------------


@kernel
def welford_mean_var(input, channel_last):
    op = "welford_mean_var"
    channels, place = _channels_of(op, input, channel_last), tensors.place_of(input)
    if place is None:
        return None
    x = _in_format(input, channels.format)
    made = torch.empty(2 * channels.size + 1, dtype=channels.math, device=input.device)
    if x.numel() == 0:
        return made.zero_()
    packed = _reduce(*_shape_of(op, x, channels, None), x.data_ptr(), made.data_ptr(), *(0,) * 6)
    return made if workspace.run(_c_moments, place, packed, op, x) else None


@kernel
def reduce_bn(grad_output, input, mean, inv_std, weight, channel_last, bitmask):
    op = "reduce_bn"
    channels = _channels_of(op, input, channel_last, nhwc=bitmask is not None)
    _check_bitmask(op, bitmask, input)
    _check_gradient(op, grad_output, input)
    _check_statistics(op, channels, mean=mean, inv_std=inv_std)
    affine(op, weight, None, input, channels.size)
    place = tensors.place_of(input)
    if place is None:
        return None
    x, dy = _in_format(input, channels.format), _in_format(grad_output, channels.format)
    m, r, mask = mean.contiguous(), inv_std.contiguous(), contiguous(bitmask)
    sums = torch.empty(2 * channels.size, dtype=channels.math, device=x.device)
    like = sums.new_empty(0) if weight is None else weight.new_empty(channels.size)
    of_weight, of_bias = like, torch.empty_like(like)
    if x.numel() == 0:
        return sums.zero_(), of_weight.zero_(), of_bias.zero_()
    given = weight is not None
    packed = _reduce(
        *_shape_of(op, x, channels, weight), x.data_ptr(), sums.data_ptr(), dy.data_ptr(), m.data_ptr(), r.data_ptr(),
        address(mask), of_weight.data_ptr() if given else 0, of_bias.data_ptr() if given else 0,
    )  # fmt: skip
    return (sums, of_weight, of_bias) if workspace.run(_c_sums, place, packed, op, x) else None


@kernel
def batchnorm_forward(input, z, mean, inv_std, weight, shift, fuse_relu, channel_last):
    op = "batchnorm_forward"
    channels = _channels_of(op, input, channel_last)
    _check_normalization(op, input, channels, z, mean, inv_std, weight, shift)
    return _run_apply(op, channels, input, mean, inv_std, z=z, weight=weight, shift=shift, relu=fuse_relu)


@kernel
def batchnorm_backward(grad_output, input, mean, inv_std, weight, sum_dy, sum_dy_xmu, count, channel_last):
    op = "batchnorm_backward"
    channels = _channels_of(op, input, channel_last)
    _check_normalization(op, input, channels, None, mean, inv_std, weight, None)
    _check_gradient(op, grad_output, input)
    _check_sums(op, input, channels, sum_dy, sum_dy_xmu, count)
    sums = sum_dy, sum_dy_xmu, count
    return _run_apply(op, channels, input, mean, inv_std, grad=grad_output, weight=weight, sums=sums)


@kernel
def relu_bw(grad_output, input, z, mean, inv_std, weight, shift, channel_last):
    op = "relu_bw"
    channels = _channels_of(op, input, channel_last)
    _check_normalization(op, input, channels, z, mean, inv_std, weight, shift)
    _check_gradient(op, grad_output, input)
    return _run_apply(op, channels, input, mean, inv_std, grad=grad_output, z=z, weight=weight, shift=shift)


@kernel
def groupbn_forward(input, z, mean, inv_std, weight, shift, fuse_relu, make_bitmask, channel_last):
    op = "groupbn_forward"
    channels = _channels_of(op, input, channel_last, nhwc=True)
    _check_normalization(op, input, channels, z, mean, inv_std, weight, shift)
    value(
        fuse_relu or not make_bitmask,
        "groupbn_forward: a bitmask says what a ReLU let through: make_bitmask needs fuse_relu",
    )
    size = (input.numel() + 7) // 8 if make_bitmask else 0
    mask = torch.empty(size, dtype=torch.uint8, device=input.device)
    output = _run_apply(
        op, channels, input, mean, inv_std, z=z, weight=weight, shift=shift, relu=fuse_relu,
        bitmask=mask if make_bitmask else None,
    )  # fmt: skip
    return None if output is None else (output, mask)


@kernel
def groupbn_backward(
    grad_output, input, bitmask, mean, inv_std, weight, sum_dy, sum_dy_xmu, count, of_z, channel_last
):
    op = "groupbn_backward"
    channels = _channels_of(op, input, channel_last, nhwc=True)
    _check_normalization(op, input, channels, None, mean, inv_std, weight, None)
    _check_gradient(op, grad_output, input)
    _check_bitmask(op, bitmask, input)
    _check_sums(op, input, channels, sum_dy, sum_dy_xmu, count)
    grad_z = _output_like(input, channels) if of_z else torch.empty(0, dtype=input.dtype, device=input.device)
    output = _run_apply(
        op, channels, input, mean, inv_std, grad=grad_output, weight=weight, bitmask=contiguous(bitmask),
        grad_z=grad_z if of_z else None, sums=(sum_dy, sum_dy_xmu, count),
    )  # fmt: skip
    return None if output is None else (output, grad_z)
