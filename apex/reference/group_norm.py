"""Group norm, with SiLU after it or without, in plain PyTorch."""

import math

import torch

from apex.reference._leaves import differentiate


def _math_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check(input, num_groups, weight, bias):
    """Raises TypeError or ValueError, as the bindings do."""
    if input.dim() < 2:
        raise ValueError(
            f"group_norm: the input has {input.dim()} dimensions; it must have at least 2, batch and channels"
        )
    if not input.dtype.is_floating_point:
        raise TypeError(f"group_norm takes float32, float16, bfloat16 and float64, not {input.dtype}")
    if num_groups < 1:
        raise ValueError(f"group_norm: num_groups must be at least 1, not {num_groups}")
    if input.shape[1] % num_groups:
        raise ValueError(f"group_norm: {input.shape[1]} channels cannot be parted into {num_groups} groups")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if tuple(tensor.shape) != (input.shape[1],):
            raise ValueError(
                f"group_norm: {name} has shape {list(tensor.shape)} but the input has {input.shape[1]} channels"
            )
        if tensor.device != input.device:
            raise ValueError(f"group_norm: {name} is on {tensor.device} but the input is on {input.device}")
        if (tensor.dtype == torch.float64) != (input.dtype == torch.float64):
            raise TypeError(
                f"group_norm: float64 goes with float64 alone: the input is {input.dtype}, the {name} {tensor.dtype}"
            )
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        raise TypeError("group_norm: weight and bias must have one dtype")


def _check_backward(grad_output, input, mean, rstd, num_groups):
    if grad_output.shape != input.shape or grad_output.device != input.device:
        raise ValueError(
            f"group_norm: the gradient has shape {list(grad_output.shape)} on {grad_output.device}, not "
            f"{list(input.shape)} on {input.device}"
        )
    if grad_output.dtype != input.dtype:
        raise TypeError(f"group_norm: the gradient is {grad_output.dtype}, not {input.dtype}")
    for name, tensor in (("mean", mean), ("rstd", rstd)):
        if tuple(tensor.shape) != (input.shape[0], num_groups):
            raise ValueError(
                f"group_norm: {name} must hold one number for each image and group, not have shape "
                f"{list(tensor.shape)} on {tensor.device}"
            )
        if tensor.dtype != _math_dtype(input.dtype):
            raise TypeError(f"group_norm: {name} must be {_math_dtype(input.dtype)}, not {tensor.dtype}")


def _in_layout_of(tensor, input):
    """`tensor` laid out as an output for this input is: channels last if the input is, else contiguous."""
    if input.is_contiguous():
        return tensor.contiguous()
    if input.dim() == 3 and input.transpose(1, 2).is_contiguous():
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    for dims, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if input.dim() == dims and input.is_contiguous(memory_format=layout):
            # Not contiguous(): strides of a dimension of one element would stay what they are.
            return torch.empty_like(tensor, memory_format=layout).copy_(tensor)
    return tensor.contiguous()


def _grouped(tensor, num_groups):
    """[batch, groups, channels of a group, spatial] in the arithmetic's dtype, contiguous: torch's sums along memory
    are its most exact ones."""
    batch, channels = tensor.shape[:2]
    shape = (batch, num_groups, channels // num_groups, math.prod(tensor.shape[2:]))
    return tensor.to(_math_dtype(tensor.dtype)).reshape(shape).contiguous()


def _of_channels(tensor, num_groups, otherwise):
    """A weight as it goes with a grouped input; a number where there is none."""
    if tensor is None:
        return otherwise
    return tensor.to(_math_dtype(tensor.dtype)).reshape(1, num_groups, -1, 1)


def _silu_slope(z):
    s = torch.sigmoid(z)
    return s * (1 + z * (1 - s))


def group_norm_forward(input, num_groups, weight=None, bias=None, eps=1e-05, silu=False):
    """(output, mean, rstd) of (input - mean) * rstd * weight + bias, and x * sigmoid(x) of that if silu.

    input: [batch, channels, ...], float16, bfloat16, float32 or float64; statistics are over the channels of a
    group and all that follows. weight, bias: [channels], of any of these dtypes but float64, which goes with
    itself alone. output: of the input's shape and dtype; channels last if the input is, else contiguous. mean,
    rstd: [batch, num_groups], float32 (float64 for float64); rstd is 1 / sqrt(variance + eps). Raises
    ValueError and TypeError.
    """
    _check(input, num_groups, weight, bias)
    math = _math_dtype(input.dtype)
    if not input.numel():
        statistics = input.new_full((input.shape[0], num_groups), float("nan"), dtype=math)
        return _in_layout_of(torch.empty_like(input), input), statistics, statistics.clone()
    x = _grouped(input, num_groups)
    first = x[:, :, :1, :1]  # sums of a large mean would round
    x = x - first
    apart = x.mean((2, 3), keepdim=True)
    mean, x = first + apart, x - apart
    rstd = torch.rsqrt(x.square().mean((2, 3), keepdim=True) + eps)
    x = x * rstd * _of_channels(weight, num_groups, 1) + _of_channels(bias, num_groups, 0)
    if silu:
        x = torch.nn.functional.silu(x)
    shape = (input.shape[0], num_groups)
    output = _in_layout_of(x.reshape(input.shape).to(input.dtype), input)
    return output, mean.reshape(shape), rstd.reshape(shape)


def group_norm_backward(
    grad_output, input, mean, rstd, num_groups, weight, bias, eps, silu=False, weight_gradients=True
):
    """(grad_input, grad_weight, grad_bias); the last two have no element where not wanted or not there.

    mean, rstd: of the forward. grad_input is laid out as the forward's output.
    """
    _check(input, num_groups, weight, bias)
    _check_backward(grad_output, input, mean, rstd, num_groups)
    return _gradients(grad_output, input, mean, rstd, num_groups, weight, bias, silu, weight_gradients)


def _gradients(grad_output, input, mean, rstd, num_groups, weight, bias, silu, wanted):
    def of_weight(value, like):
        if like is None or not wanted:
            return input.new_empty(0)
        return value.sum((0, 3)).reshape(-1).to(like.dtype)

    g = _grouped(grad_output, num_groups)
    statistics = (*g.shape[:2], 1, 1)
    mean, rstd = mean.reshape(statistics), rstd.reshape(statistics)
    x = (_grouped(input, num_groups) - mean) * rstd
    w = _of_channels(weight, num_groups, 1)
    if silu:
        g = g * _silu_slope(x * w + _of_channels(bias, num_groups, 0))
    gw = g * w
    if input.numel():
        grad = (gw - gw.mean((2, 3), keepdim=True) - x * (gw * x).mean((2, 3), keepdim=True)) * rstd
    else:
        grad = gw
    grad = _in_layout_of(grad.reshape(input.shape).to(input.dtype), input)
    return grad, of_weight(g * x, weight), of_weight(g, bias)


class _Pair:
    """How autograd and autocast treat the pair where no binding fits this torch."""

    name = "group_norm"

    def setup_context(self, ctx, inputs, output):
        """Keeps what the backward needs."""
        # torch leaves arguments out that have their default and come last.
        input, groups, weight, bias, eps, silu = (*inputs, *(None, None, 1e-05, False)[len(inputs) - 2 :])
        ctx.mark_non_differentiable(output[1], output[2])
        ctx.save_for_backward(input, output[1], output[2], weight, bias)
        ctx.known = (groups, eps, silu)
        ctx.set_materialize_grads(False)

    def backward(self, ctx, grad_output, *_):
        """Gradients of the forward's inputs, through the backward op."""
        if grad_output is None:
            return (None,) * 6
        input, mean, rstd, weight, bias = ctx.saved_tensors
        groups, eps, silu = ctx.known
        needed = (*ctx.needs_input_grad, *[False] * 6)[:6]
        of_input, of_weight, of_bias = torch.ops.apex.group_norm_backward(
            grad_output, input, mean, rstd, groups, weight, bias, eps, silu, needed[2] or needed[3]
        )
        of_weight = of_weight if weight is not None and needed[2] else None
        of_bias = of_bias if bias is not None and needed[3] else None
        return of_input, None, of_weight, of_bias, None, None

    def setup_double_context(self, ctx, inputs, output):
        """Keeps all inputs of the backward."""
        grad_output, input, _, _, groups, weight, bias, eps, silu, wanted = (
            *inputs,
            *(False, True)[len(inputs) - 8 :],
        )
        ctx.save_for_backward(grad_output, input, weight, bias)
        ctx.known = (groups, eps, silu, wanted)
        ctx.set_materialize_grads(False)

    def double_backward(self, ctx, *gradients):
        """By torch's own differentiable ops."""
        groups, eps, silu, wanted = ctx.known

        def again(grad_output, input, weight, bias):
            x = _grouped(input, groups)
            mean = x.mean((2, 3), keepdim=True)
            rstd = torch.rsqrt((x - mean).square().mean((2, 3), keepdim=True) + eps)
            return _gradients(grad_output, input, mean, rstd, groups, weight, bias, silu, wanted)

        of = differentiate(again, ctx.saved_tensors, gradients)
        return of[0], of[1], None, None, None, of[2], of[3], None, None, None

    def autocast(self, device_type, arguments, keywords):
        """None: the output has the input's dtype, and weights may have another."""
        names = ("input", "num_groups", "weight", "bias", "eps", "silu")
        return dict(zip(names, arguments, strict=False)) | keywords


PAIRS = (_Pair(),)
