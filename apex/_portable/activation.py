"""bias_activation and index_mul_2d: csrc/bindings/{bias_activation,index_mul_2d}.h in Python. And the loss scale's
update, update_scale_hysteresis."""

from __future__ import annotations

import torch

from apex._portable import interface, tensors, workspace
from apex._portable.checks import float64_alone, is_index, like, type_, value
from apex._portable.functional import kernel
from apex._portable.tensors import F32, address, code_of, contiguous
from apex.reference.bias_activation import ACTIVATIONS

# ---- bias_activation -------------------------------------------------------------------------------------------------

_OP = "bias_activation"
# What f is in csrc/device/bias_activation.h.
_X_SIGMOID, _SIGMOID, _SQUARED_RELU, _RELU = range(4)
_KINDS = {"squared_relu": _SQUARED_RELU, "relu": _RELU, "sigmoid": _SIGMOID}
# slope, cubic, function
FUNCTIONS = {name: (*numbers, _KINDS.get(name, _X_SIGMOID)) for name, numbers in ACTIVATIONS.items()}
_pack = interface.layout("BiasActivation").packer(
    "input", "bias", "hidden", "rows", "slope", "cubic", "function", "gated", "type", "bias_type", "output",
    "grad_output", "grad_bias",
)  # fmt: skip
_c_forward = interface.function("apex_bias_activation_forward")
_c_backward = interface.function("apex_bias_activation_backward")


def function_of(activation):
    """(slope, cubic, function) of an activation's name; raises ValueError for another."""
    value(
        activation in FUNCTIONS,
        "bias_activation: the activation must be silu, gelu, quick_gelu, relu, squared_relu or sigmoid, not '{}'",
        activation,
    )
    return FUNCTIONS[activation]


def _check(input, bias, activation, gated):
    """The output's columns."""
    function_of(activation)
    code_of(_OP, input.dtype)
    value(input.dim() >= 1, "bias_activation: the input must have at least one dimension")
    columns = input.shape[-1]
    value(
        not gated or columns % 2 == 0,
        "bias_activation: a gated activation halves the last dimension, which is {}", columns,
    )  # fmt: skip
    if bias is not None:
        code_of(_OP, bias.dtype)
        like(_OP, "bias", bias, (columns,), None, "the input's last, ")
        float64_alone(_OP, "bias", bias, input, "bias")
    return columns // 2 if gated else columns


def _arguments(x, b, activation, gated, output, grad=None, grad_bias=None):
    columns, code = x.shape[-1], code_of(_OP, x.dtype)
    return _pack(
        x.data_ptr(), address(b), columns // (2 if gated else 1), x.numel() // columns if columns else 0,
        *FUNCTIONS[activation], gated, code, code if b is None else code_of(_OP, b.dtype), output.data_ptr(),
        address(grad), address(grad_bias),
    )  # fmt: skip


@kernel
def bias_activation_forward(input, bias, activation, gated):
    hidden = _check(input, bias, activation, gated)
    place = tensors.place_of(input)
    if place is None:
        return None
    x, b = input.contiguous(), contiguous(bias)
    output = input.new_empty((*input.shape[:-1], hidden))
    status = _c_forward(place, _arguments(x, b, activation, gated, output))
    return None if status and tensors.must_use_reference(status, _OP) else output


@kernel
def bias_activation_backward(grad_output, input, bias, activation, gated, bias_gradient):
    hidden = _check(input, bias, activation, gated)
    shape = (*input.shape[:-1], hidden)
    like(_OP, "the gradient", grad_output, shape, input.dtype)
    place = tensors.place_of(input)
    if place is None:
        return None
    x, b, g = input.contiguous(), contiguous(bias), grad_output.contiguous()
    of_input, wanted = input.new_empty(input.shape), bias is not None and bias_gradient
    of_bias = bias.new_empty(bias.shape) if wanted else input.new_empty(0)
    packed = _arguments(x, b, activation, gated, of_input, g, of_bias if wanted else None)
    return (of_input, of_bias) if workspace.run(_c_backward, place, packed, _OP, x) else None


# ---- index_mul_2d ----------------------------------------------------------------------------------------------------

_MUL = "index_mul_2d"
_mul = interface.layout("IndexMul2d").packer(
    "a", "b", "out", "index", "order", "begins", "rows", "entries", "features", "type", "wide_index"
)
_c_gather, _c_scatter = (
    interface.function("apex_index_mul_2d_forward"),
    interface.function("apex_index_mul_2d_scatter"),
)


def _check_mul(in1, second, idx1):
    """`second` has the shape of the product."""
    code_of(_MUL, in1.dtype)
    type_(
        in1.dtype is second.dtype,
        "index_mul_2d: tensors must have one dtype, not {} and {}",
        in1.dtype,
        second.dtype,
    )
    type_(is_index(idx1), "index_mul_2d: idx1 is int64 or int32, not {}", idx1.dtype)
    value(
        in1.dim() == 2
        and second.dim() == 2
        and idx1.dim() == 1
        and in1.shape[1] == second.shape[1]
        and second.shape[0] == idx1.shape[0],
        "index_mul_2d: in1 [entries, features], in2 [rows, features] and idx1 [rows] do not fit: {}, {}, {}",
        in1.shape, second.shape, idx1.shape,
    )  # fmt: skip


def _gather(place, source, factor, idx):
    a, b, i = source.contiguous(), factor.contiguous(), idx.contiguous()
    out = b.new_empty(b.shape)
    packed = _mul(
        a.data_ptr(), b.data_ptr(), out.data_ptr(), i.data_ptr(), 0, 0, b.shape[0], a.shape[0], b.shape[1],
        code_of(_MUL, a.dtype), i.dtype is torch.int64,
    )  # fmt: skip
    status = _c_gather(place, packed)
    return None if status and tensors.must_use_reference(status, _MUL) else out


def _scatter(place, first, second, idx, entries):
    a, b, i = first.contiguous(), second.contiguous(), idx.to(torch.int64)
    ordered, order = torch.sort(i, stable=True, dim=0)
    begins = torch.searchsorted(
        ordered, torch.arange(entries + 1, dtype=torch.int64, device=i.device)
    ).contiguous()
    rows, out = order.contiguous(), a.new_empty((entries, a.shape[1]))
    packed = _mul(
        a.data_ptr(), b.data_ptr(), out.data_ptr(), 0, rows.data_ptr(), begins.data_ptr(), a.shape[0], entries,
        a.shape[1], code_of(_MUL, a.dtype), 0,
    )  # fmt: skip
    status = _c_scatter(place, packed)
    return None if status and tensors.must_use_reference(status, _MUL) else out


@kernel
def index_mul_2d_forward(in1, in2, idx1):
    _check_mul(in1, in2, idx1)
    place = tensors.place_of(in1)
    return None if place is None else _gather(place, in1, in2, idx1)


@kernel
def index_mul_2d_backward(grad_out, in1, in2, idx1, of_in1, of_in2):
    _check_mul(in1, in2, idx1)
    _check_mul(in1, grad_out, idx1)
    place = tensors.place_of(in1)
    if place is None:
        return None
    second = _gather(place, in1, grad_out, idx1) if of_in2 else in1.new_empty(0)
    if second is None:
        return None
    first = _scatter(place, grad_out, in2, idx1, in1.shape[0]) if of_in1 else in1.new_empty(0)
    return None if first is None else (first, second)


# ---- update_scale_hysteresis -----------------------------------------------------------------------------------------

_scale = interface.layout("ScaleHysteresis").packer(
    "scale", "growth_tracker", "hysteresis_tracker", "found_inf", "growth_factor", "backoff_factor", "growth_interval",
    "hysteresis",
)  # fmt: skip
_c_scale = interface.function("apex_update_scale_hysteresis")


@torch.no_grad()
def update_scale_hysteresis(
    current_scale,
    growth_tracker,
    hysteresis_tracker,
    found_inf,
    growth_factor,
    backoff_factor,
    growth_interval,
    hysteresis,
):
    """The dispatcher's kernel, and the direct entry: all tensors hold one element and are written where they lie."""
    device = current_scale.device
    packed = _scale(
        tensors.scalar(current_scale, "current_scale", F32, device, True),
        tensors.scalar(growth_tracker, "growth_tracker", torch.int32, device, True),
        tensors.scalar(hysteresis_tracker, "hysteresis_tracker", torch.int32, device, True),
        tensors.scalar(found_inf, "found_inf", F32, device),
        growth_factor, backoff_factor, growth_interval, hysteresis,
    )  # fmt: skip
    place = tensors.place_of_device(device)
    status = tensors.USE_REFERENCE if place is None else _c_scale(place, packed)
    if status and tensors.must_use_reference(status, "update_scale_hysteresis"):
        torch.ops.apex_reference.update_scale_hysteresis(
            current_scale, growth_tracker, hysteresis_tracker, found_inf, growth_factor, backoff_factor,
            growth_interval, hysteresis,
        )  # fmt: skip
