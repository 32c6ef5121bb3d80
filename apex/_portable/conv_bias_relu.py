"""conv_bias_relu: csrc/bindings/conv_bias_relu.h in Python."""

from __future__ import annotations

import torch

from apex._portable import channels, interface, tensors, workspace
from apex._portable.checks import float64_alone, like, type_, value
from apex._portable.functional import kernel
from apex._portable.tensors import address, code_of, contiguous, math_type

_OP = "conv_bias_relu"
_RELU = 3  # in csrc/device/bias_activation.h
_LAST, _FIRST = torch.channels_last, torch.contiguous_format
_pack = interface.layout("BiasActivation").packer(
    "input",
    "hidden",
    "rows",
    "function",
    "type",
    "bias_type",
    "output",
    "grad_output",
    "grad_bias",
    "scale",
    "unscaled",
)
_c_finish = interface.function("apex_batchnorm_forward")
_c_backward = interface.function("apex_bias_activation_backward")


def _format_of(*operands):
    """Channels last where the input or the weight is, as torch's."""
    known = (t.is_contiguous(memory_format=_LAST) and not t.is_contiguous() for t in operands)
    return _LAST if any(known) else _FIRST


def _check(input, weight, scale, bias, stride, padding):
    """The output's shape."""
    code_of(_OP, input.dtype)
    value(
        input.dim() == 4 and weight.dim() == 4 and input.shape[1] == weight.shape[1],
        "{}: input [batch, channels, height, width] and weight [outputs, channels, height, width] do not fit (there "
        "are no groups): {} and {}", _OP, input.shape, weight.shape,
    )  # fmt: skip
    type_(weight.dtype is input.dtype, "{}: the input is {}, the weight {}", _OP, input.dtype, weight.dtype)
    value(
        stride >= 1 and padding >= 0,
        "{}: stride must be at least 1 and padding 0, not {} and {}", _OP, stride, padding,
    )  # fmt: skip
    value(0 not in weight.shape, "{}: the weight, {}, has no elements", _OP, weight.shape)
    for d in (2, 3):
        value(
            input.shape[d] + 2 * padding >= weight.shape[d],
            "{}: the weight, {}, is larger than the input, {}, with a padding of {}",
            _OP, weight.shape, input.shape, padding,
        )  # fmt: skip
    for name, tensor in (("scale", scale), ("bias", bias)):
        if tensor is None:
            continue
        value(
            tensor.dim() == 1 and tensor.shape[0] == weight.shape[0],
            "{}: {} has shape {} but the weight {} outputs", _OP, name, tensor.shape, weight.shape[0],
        )  # fmt: skip
        code_of(_OP, tensor.dtype)
        float64_alone(_OP, name, tensor, input, name)
    type_(
        scale is None or bias is None or scale.dtype is bias.dtype,
        "{}: scale and bias must have one dtype",
        _OP,
    )
    sizes = ((input.shape[d] + 2 * padding - weight.shape[d]) // stride + 1 for d in (2, 3))
    return (input.shape[0], weight.shape[0], *sizes)


def _finish(place, x, scale, bias, residual, format, relu, made):
    """Whether it wrote x * scale + bias + residual, or its ReLU, to `made`."""
    last = format is _LAST
    shape = channels._shape_of(
        _OP,
        x,
        channels._Channels(x.shape[1], format, last, math_type(x.dtype)),
        bias if scale is None else scale,
    )
    packed = channels._apply(
        *shape, x.data_ptr(), 0, address(residual), 0, 0, address(scale), address(bias), made.data_ptr(), relu,
        *(0,) * 7,
    )  # fmt: skip
    status = _c_finish(place, packed)
    return not (status and tensors.must_use_reference(status, _OP))


def _is_fused(input, weight, scale, bias, residual, relu, format):
    """Whether cuDNN's convolution does all of it: csrc/bindings/conv_bias_relu.h says where that is faster."""
    alone = relu and scale is None and residual is None and bias is not None and bias.dtype is input.dtype
    return (
        alone and input.is_cuda and torch.version.hip is None and input.dtype is torch.float16 and format is _LAST
        and input.numel() > 0 and weight.shape[0] % 8 == 0 and weight.shape[1] % 8 == 0
        and torch.backends.cudnn.enabled
    )  # fmt: skip


def _convolve(input, weight, scale, bias, residual, relu, stride, padding, format, place):
    """All but the mask; None: the reference must run."""
    in_format = lambda t: None if t is None else t.contiguous(memory_format=format)  # noqa: E731
    operands, sizes = (in_format(input), in_format(weight)), ([stride] * 2, [padding] * 2, [1, 1])
    if _is_fused(input, weight, scale, bias, residual, relu, format):
        return in_format(torch.ops.aten.cudnn_convolution_relu(*operands, bias.contiguous(), *sizes, 1))
    # A CPU's convolution adds the bias before it rounds, those of GPUs behind it.
    added = bias.to(input.dtype) if input.is_cpu and scale is None and bias is not None else None
    made = in_format(torch.ops.aten.convolution(*operands, added, *sizes, False, [0, 0], 1))
    s, b, more = contiguous(scale), contiguous(bias if added is None else None), in_format(residual)
    passes = relu or any(t is not None for t in (s, b, more))
    return None if passes and not _finish(place, made, s, b, more, format, relu, made) else made


@kernel
def conv_bias_relu_forward(input, weight, scale, bias, residual, mask, stride, padding, relu):
    shape = _check(input, weight, scale, bias, stride, padding)
    like(_OP, "residual", residual, shape, input.dtype, "the output's ")
    value(mask is None or relu, "{}: a mask goes with a ReLU", _OP)
    like(_OP, "mask", mask, shape, None, "the output's ")
    place = tensors.place_of(input)
    if place is None:
        return None
    format = _format_of(input, weight)
    made = _convolve(input, weight, scale, bias, residual, relu, stride, padding, format, place)
    return made if mask is None or made is None else made.masked_fill_(mask == 0, 0)


def _masked(place, g, y, scale, of_bias, of_residual):
    """(gradient behind the scale, before it), with of_bias written; None: the reference must run."""
    scaled = torch.empty_like(y)
    unscaled = torch.empty_like(y) if of_residual and scale is not None else None
    code, hidden = code_of(_OP, y.dtype), y.shape[1]
    numbers = of_bias if scale is None else scale
    packed = _pack(
        y.data_ptr(), hidden, y.numel() // hidden if hidden else 0, _RELU, code,
        code if numbers is None else code_of(_OP, numbers.dtype), scaled.data_ptr(), g.data_ptr(), address(of_bias),
        address(scale), address(unscaled),
    )  # fmt: skip
    if not workspace.run(_c_backward, place, packed, _OP, y):
        return None
    return scaled, scaled if unscaled is None else unscaled


def _plain(place, g, scale, of_bias, of_residual, relu, format):
    """The same of a gradient that the ReLU's mask, if there is one, has been taken of."""
    if of_bias is not None:
        nothing = g.new_zeros(g.shape[1], dtype=math_type(g.dtype))
        sums = channels.reduce_bn(g, g, nothing, nothing, of_bias, False, None)
        if sums is None:
            return None
        of_bias.copy_(sums[2])
    rest = g if relu or not of_residual else g.clone()
    if scale is None:
        return g, rest
    scaled = torch.empty_like(g)
    return (scaled, rest) if _finish(place, g, scale, None, None, format, False, scaled) else None


@kernel
def conv_bias_relu_backward(
    grad_output,
    input,
    weight,
    scale,
    bias,
    output,
    stride,
    padding,
    of_input,
    of_weight,
    of_bias,
    of_residual,
):
    shape = _check(input, weight, scale, bias, stride, padding)
    like(_OP, "the gradient", grad_output, shape, input.dtype)
    like(_OP, "what the forward kept", output, shape, input.dtype)
    place = tensors.place_of(input)
    if place is None:
        return None
    format = _format_of(input, weight)
    convolves, relu = of_input or of_weight, output is not None
    s = contiguous(scale) if convolves else None
    sums = bias.new_empty(bias.shape) if of_bias and bias is not None else None
    g = grad_output.contiguous(memory_format=format)
    if relu:
        y = output.contiguous(memory_format=format)
    if relu and format is _LAST:
        found = _masked(place, g, y, s, sums, of_residual)
    else:
        g = torch.ops.aten.threshold_backward(g, y, 0) if relu else g
        found = _plain(place, g, s, sums, of_residual, relu, format)
    if found is None:
        return None
    made = [None, None, sums, found[1] if of_residual else None]
    if convolves:
        gradients = torch.ops.aten.convolution_backward(
            found[0], input.contiguous(memory_format=format), weight.contiguous(memory_format=format), None,
            [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, [of_input, of_weight, False],
        )  # fmt: skip
        for i, wanted in enumerate((of_input, of_weight)):
            if wanted:
                made[i] = gradients[i].contiguous(memory_format=format)
    return tuple(input.new_empty(0) if t is None else t for t in made)
