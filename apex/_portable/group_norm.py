"""Group norm, with SiLU after it or without: csrc/bindings/group_norm.h in Python."""

from __future__ import annotations

import math

import torch

from apex._portable import interface, tensors, workspace
from apex._portable.checks import affine, like, value
from apex._portable.functional import kernel
from apex._portable.tensors import address, code_of, contiguous, math_type

_OP = "group_norm"
_pack = interface.layout("GroupNorm").packer(
    "input", "weight", "bias", "batch", "channels", "groups", "spatial", "eps", "input_type", "weight_type",
    "channels_last", "silu", "output", "mean", "rstd", "grad_output", "grad_weight", "grad_bias",
)  # fmt: skip
_c_forward, _c_backward = (
    interface.function("apex_group_norm_forward"),
    interface.function("apex_group_norm_backward"),
)
# How kernels read a tensor, and how outputs lie in memory: a memory format, or channels last of three dimensions.
_LAST_1D = "channels_last_1d"


def _check(input, groups, weight, bias):
    value(
        input.dim() >= 2,
        "group_norm: the input has {} dimensions; it must have at least 2, batch and channels",
        input.dim(),
    )
    code_of(_OP, input.dtype)
    channels = input.shape[1]
    value(groups >= 1, "group_norm: num_groups must be at least 1, not {}", groups)
    value(channels % groups == 0, "group_norm: {} channels cannot be parted into {} groups", channels, groups)
    affine(_OP, weight, bias, input, channels)


def _format_of(input):
    if input.is_contiguous():
        return torch.contiguous_format
    if input.dim() == 3 and input.transpose(1, 2).is_contiguous():
        return _LAST_1D
    for dims, format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if input.dim() == dims and input.is_contiguous(memory_format=format):
            return format
    return torch.contiguous_format


def _in_format(tensor, format):
    if format == _LAST_1D:
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    return tensor.contiguous(memory_format=format)


def _empty_like(input, format):
    if format == _LAST_1D:
        return input.new_empty((input.shape[0], input.shape[2], input.shape[1])).transpose(1, 2)
    return torch.empty(input.shape, dtype=input.dtype, device=input.device, memory_format=format)


def _arguments(x, format, groups, w, b, eps, silu, output, mean, rstd, *gradients):
    spatial, code = math.prod(x.shape[2:]), code_of(_OP, x.dtype)
    like = w if w is not None else b
    return _pack(
        x.data_ptr(), address(w), address(b), x.shape[0], x.shape[1], groups, spatial, eps, code,
        code if like is None else code_of(_OP, like.dtype), format != torch.contiguous_format or spatial == 1, silu,
        output.data_ptr(), mean.data_ptr(), rstd.data_ptr(), *(address(t) for t in gradients or (None,) * 3),
    )  # fmt: skip


@kernel
def group_norm_forward(input, num_groups, weight, bias, eps, silu):
    _check(input, num_groups, weight, bias)
    place = tensors.place_of(input)
    if place is None:
        return None
    format = _format_of(input)
    x, w, b = _in_format(input, format), contiguous(weight), contiguous(bias)
    output = _empty_like(input, format)
    mean = input.new_empty((input.shape[0], num_groups), dtype=math_type(input.dtype))
    rstd = torch.empty_like(mean)
    packed = _arguments(x, format, num_groups, w, b, eps, silu, output, mean, rstd)
    if not workspace.run(_c_forward, place, packed, _OP, x):
        return None
    if x.numel() == 0:
        mean.fill_(math.nan)
        rstd.fill_(math.nan)
    return output, mean, rstd


def _check_backward(grad, input, mean, rstd, groups):
    kind = math_type(input.dtype)
    like(_OP, "the gradient", grad, input.shape, input.dtype)
    for name, one in (("mean", mean), ("rstd", rstd)):
        like(_OP, name, one, (input.shape[0], groups), kind, "one for each image and group, ")


@kernel
def group_norm_backward(
    grad_output, input, mean, rstd, num_groups, weight, bias, eps, silu, weight_gradients
):
    _check(input, num_groups, weight, bias)
    _check_backward(grad_output, input, mean, rstd, num_groups)
    place = tensors.place_of(input)
    if place is None:
        return None
    format = _format_of(input)
    x, dy = _in_format(input, format), _in_format(grad_output, format)
    w, b, m, r = contiguous(weight), contiguous(bias), mean.contiguous(), rstd.contiguous()
    of_input = _empty_like(input, format)
    of_weight, of_bias = (
        t.new_empty(t.shape) if t is not None and weight_gradients else input.new_empty(0) for t in (w, b)
    )
    wanted = [
        made if t is not None and weight_gradients else None for t, made in ((w, of_weight), (b, of_bias))
    ]
    packed = _arguments(x, format, num_groups, w, b, eps, silu, of_input, m, r, dy, *wanted)
    if not workspace.run(_c_backward, place, packed, _OP, x):
        return None
    if x.numel() == 0:
        of_weight.zero_()
        of_bias.zero_()
    return of_input, of_weight, of_bias
