"""Bias and activation, gated or not, in plain PyTorch."""

import torch

from apex.reference._leaves import differentiate

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_GELU = 1.5957691216057308  # 2 sqrt(2 / pi)
# slope and cubic of x * sigmoid(slope * x + cubic * x^3); what is no such product has a branch of its own below
ACTIVATIONS = {
    "silu": (1.0, 0.0),
    "quick_gelu": (1.702, 0.0),
    "gelu": (_GELU, _GELU * 0.044715),
    "squared_relu": (0.0, 0.0),
    "relu": (0.0, 0.0),
    "sigmoid": (1.0, 0.0),
}
_FARTHEST = {
    torch.float32: 87.0,
    torch.float64: 700.0,
}  # where exp stays in range, as in csrc/device/bias_activation.h


def _check(input, bias, activation, gated):
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"bias_activation: the activation must be silu, gelu, quick_gelu, relu, squared_relu or "
            f"sigmoid, not {activation!r}"
        )
    for tensor in (input, bias):
        if tensor is not None and tensor.dtype not in _FLOATS:
            raise TypeError(
                f"bias_activation takes float32, float16, bfloat16 and float64, not {tensor.dtype}"
            )
    if input.dim() < 1:
        raise ValueError("bias_activation: the input must have at least one dimension")
    columns = input.shape[-1]
    if gated and columns % 2:
        raise ValueError(f"bias_activation: a gated activation halves the last dimension, which is {columns}")
    if bias is None:
        return
    if bias.dim() != 1 or bias.shape[0] != columns:
        raise ValueError(
            f"bias_activation: bias has shape {list(bias.shape)} but the input ends in {columns}"
        )
    if bias.device != input.device:
        raise ValueError(f"bias_activation: bias is on {bias.device} but the input is on {input.device}")
    if (bias.dtype == torch.float64) != (input.dtype == torch.float64):
        raise TypeError(
            f"bias_activation: float64 goes with float64 alone: the input is {input.dtype}, the bias {bias.dtype}"
        )


def _math(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def _halves(input, bias, gated):
    u = input.to(_math(input.dtype))
    u = u if bias is None else u + bias.to(u.dtype)
    return u.chunk(2, -1) if gated else (u, None)


def value_and_slope(x, activation):
    """(f(x), f'(x)); far from 0 the sigmoid is held where exp stays in range, as in the kernels."""
    if activation == "sigmoid":
        sigmoid = torch.sigmoid(x)
        return sigmoid, sigmoid * torch.sigmoid(-x)
    if activation in ("relu", "squared_relu"):
        positive = torch.relu(x)
        squared = activation == "squared_relu"
        return (positive * positive, positive * 2) if squared else (positive, (x > 0) | x.isnan())
    slope, cubic = ACTIVATIONS[activation]
    most = _FARTHEST[x.dtype]
    x = x.clamp_min(-most)
    near = x.clamp_max(most)
    square = near * near
    e = torch.exp(-(near * (square * cubic + slope)).clamp(-most, most))
    sigmoid = 1 / (1 + e)
    return x * sigmoid, sigmoid + near * sigmoid * (e * sigmoid) * (square * (3 * cubic) + slope)


def bias_activation_forward(input, bias, activation, gated):
    """f(input + bias), or gated f(u1) * u2 of the two halves of u = input + bias along the last dimension.

    input: [..., columns] float16, bfloat16, float32 or float64; columns even if gated. bias: [columns] or None, of
    any of these dtypes but float64, which goes with itself alone. activation: "silu", "gelu" (its tanh form),
    "quick_gelu" (x * sigmoid(1.702 x)), "relu", "squared_relu" or "sigmoid". Returns [..., columns], or half as many
    if gated, in the input's dtype; u is not rounded to it. Raises ValueError and TypeError.
    """
    _check(input, bias, activation, gated)
    x, gate = _halves(input, bias, gated)
    y = value_and_slope(x, activation)[0]
    return (y if gate is None else y * gate).to(input.dtype).contiguous()


def _gradients(grad_output, input, bias, activation, gated, bias_gradient):
    x, gate = _halves(input, bias, gated)
    y, slope = value_and_slope(x, activation)
    g = grad_output.to(x.dtype)
    grad = g * slope if gate is None else torch.cat((g * gate * slope, g * y), -1)
    if bias is None or not bias_gradient:
        of_bias = input.new_empty(0)
    else:
        of_bias = grad.sum(list(range(grad.dim() - 1))) if grad.dim() > 1 else grad.clone()
        of_bias = of_bias.to(bias.dtype)
    return grad.to(input.dtype).contiguous(), of_bias


def bias_activation_backward(grad_output, input, bias, activation, gated, bias_gradient=True):
    """(gradient of the input, of the bias); the second has no element where there is no bias or it is not wanted.

    grad_output: as the forward's output. The bias's gradient is summed in float32 (float64) in a fixed order.
    """
    _check(input, bias, activation, gated)
    hidden = input.shape[-1] // 2 if gated else input.shape[-1]
    if grad_output.shape != (*input.shape[:-1], hidden) or grad_output.device != input.device:
        raise ValueError(
            f"bias_activation: the gradient has shape {list(grad_output.shape)} on {grad_output.device}, "
            f"not {[*input.shape[:-1], hidden]} on {input.device}"
        )
    if grad_output.dtype != input.dtype:
        raise TypeError(f"bias_activation: the gradient is {grad_output.dtype}, not {input.dtype}")
    return _gradients(grad_output, input, bias, activation, gated, bias_gradient)


class _Pair:
    """autograd and autocast of the two ops, as torch.library wants them."""

    name = "bias_activation"

    def setup_context(self, ctx, inputs, output):
        """Keeps input and bias."""
        input, bias, *ctx.known = inputs
        ctx.save_for_backward(input, bias)

    def backward(self, ctx, grad):
        """Gradients of the forward's inputs, through the backward op."""
        input, bias = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1]
        of_input, of_bias = torch.ops.apex.bias_activation_backward(grad, input, bias, *ctx.known, wanted)
        return of_input, of_bias if bias is not None and wanted else None, None, None

    def setup_double_context(self, ctx, inputs, output):
        """Keeps all inputs of the backward."""
        *tensors, activation, gated, wanted = inputs
        ctx.save_for_backward(*tensors)
        ctx.known = (activation, gated, wanted)
        ctx.set_materialize_grads(False)

    def double_backward(self, ctx, of_input, of_bias):
        """By torch's own differentiable ops."""
        again = lambda *tensors: _gradients(*tensors, *ctx.known)  # noqa: E731
        return *differentiate(again, ctx.saved_tensors, (of_input, of_bias)), None, None, None

    def autocast(self, device_type, arguments, keywords):
        """None: the output has the input's dtype."""
        return dict(zip(("input", "bias", "activation", "gated"), arguments, strict=False)) | keywords


PAIRS = (_Pair(),)
