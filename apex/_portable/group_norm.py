"""Group norm, with SiLU after it or without: csrc/bindings/group_norm.h in Python."""

from __future__ import annotations

import math

import torch

from apex._portable import interface, tensors
from apex._portable.checks import float64_alone, type_, value
from apex._portable.functional import kernel
from apex._portable.tensors import address, code_of, contiguous, math_type

_OP = "group_norm"
_layout = interface.layout("GroupNorm")
_pack = _layout.filler(
    "input", "weight", "bias", "batch", "channels", "groups", "spatial", "eps", "input_type", "weight_type",
    "channels_last", "silu", "output", "mean", "rstd", "grad_output", "grad_weight", "grad_bias",
)  # fmt: skip
_plan = interface.layout("GroupNormPlan")
_c_prepare = interface.function("apex_group_norm_prepare")
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
    for name, w in (("weight", weight), ("bias", bias)):
        if w is None:
            continue
        value(
            w.dim() == 1 and w.shape[0] == channels,
            "group_norm: {} has shape {} but the input has {} channels", name, w.shape, channels,
        )  # fmt: skip
        value(
            w.device == input.device,
            "group_norm: {} is on {} but the input is on {}",
            name,
            w.device,
            input.device,
        )
        float64_alone(_OP, name, w, input, name)
    type_(
        weight is None or bias is None or weight.dtype is bias.dtype,
        "group_norm: weight and bias must have one dtype",
    )


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


def _launch(place, buffer, run, backward, like):
    """Whether the kernels ran: what they leave for each other is allocated as the plan says."""
    plan, kept = _plan.buffer(), []
    status = _c_prepare(place, buffer, backward, plan)
    if status and tensors.must_use_reference(status, _OP):
        return False
    for name in ("group_partials", "channel_partials"):
        count = _plan.get(plan, name)
        if count:
            kept.append(like.new_empty(count))
            _layout.set(buffer, **{name: kept[-1].data_ptr()})
    status = run(place, buffer, plan)
    return not (status and tensors.must_use_reference(status, _OP))


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
    buffer = _arguments(x, format, num_groups, w, b, eps, silu, output, mean, rstd)
    if not _launch(place, buffer, _c_forward, 0, mean):
        return None
    if x.numel() == 0:
        mean.fill_(math.nan)
        rstd.fill_(math.nan)
    return output, mean, rstd


def _check_backward(grad, input, mean, rstd, groups):
    kind = math_type(input.dtype)
    value(
        grad.shape == input.shape and grad.device == input.device,
        "group_norm: the gradient has shape {} on {}, not {} on {}", grad.shape, grad.device, input.shape, input.device,
    )  # fmt: skip
    type_(grad.dtype is input.dtype, "group_norm: the gradient is {}, not {}", grad.dtype, input.dtype)
    for name, one in (("mean", mean), ("rstd", rstd)):
        value(
            one.shape == (input.shape[0], groups) and one.device == input.device,
            "group_norm: {} must hold one number for each image and group, not have shape {} on {}",
            name, one.shape, one.device,
        )  # fmt: skip
        type_(one.dtype is kind, "group_norm: {} must be {}, not {}", name, kind, one.dtype)


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
    buffer = _arguments(x, format, num_groups, w, b, eps, silu, of_input, m, r, dy, *wanted)
    if not _launch(place, buffer, _c_backward, 1, m):
        return None
    if x.numel() == 0:
        of_weight.zero_()
        of_bias.zero_()
    return of_input, of_weight, of_bias
