"""Layers of a perceptron, dense and dense_gelu_dense, in plain PyTorch: products are torch's."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from apex.reference._leaves import differentiate
from apex.reference.bias_activation import value_and_slope

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ACTIVATIONS = {
    "none": None,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
}
_KEEPS = ("sigmoid", "gelu")  # what these are taken of; ReLU's slope is the same of its result


def _check(op, input, inputs, weight, bias):
    if input.dtype not in _FLOATS:
        raise TypeError(f"{op} takes float32, float16, bfloat16 and float64, not {input.dtype}")
    if weight.dim() != 2 or weight.shape[1] != inputs:
        raise ValueError(f"{op}: a weight has shape {list(weight.shape)}, not [outputs, {inputs}]")
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[0]):
        raise ValueError(
            f"{op}: a bias has shape {list(bias.shape)} but the weight {weight.shape[0]} outputs"
        )
    for name, tensor in (("a weight", weight), ("a bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype != input.dtype:
            raise TypeError(f"{op}: tensors must have one dtype, not {input.dtype} and {tensor.dtype}")
        if tensor.device != input.device:
            raise ValueError(f"{op}: {name} is on {tensor.device} but the input is on {input.device}")


def _check_input(op, input):
    if input.dim() < 1:
        raise ValueError(f"{op}: the input must have at least one dimension")


def _check_like(op, tensor, input, outputs):
    shape = (*input.shape[:-1], outputs)
    if tensor.shape != shape or tensor.device != input.device:
        raise ValueError(
            f"{op}: the gradient has shape {list(tensor.shape)} on {tensor.device}, not {list(shape)} on {input.device}"
        )
    if tensor.dtype != input.dtype:
        raise TypeError(f"{op}: the gradient is {tensor.dtype}, not {input.dtype}")


def _activation(name):
    if name not in _ACTIVATIONS:
        raise ValueError(f"dense: the activation must be none, relu, sigmoid or gelu, not {name!r}")
    return _ACTIVATIONS[name]


def _slope(x, activation):
    """The derivative, in the arithmetic of float32 (float64)."""
    return value_and_slope(x.to(torch.promote_types(x.dtype, torch.float32)), activation)[1]


def _product(input, weight, bias):
    return F.linear(input, weight, bias).contiguous()


def _rows(tensor):
    return tensor.flatten(end_dim=-2) if tensor.dim() > 1 else tensor.unsqueeze(0)


def _gradients(g, input, weight, bias, of_input, of_weight, of_bias):
    """(of the input, the weight, the bias); without elements where not wanted."""
    none, rows = input.new_empty(0), _rows(g)
    return (
        (g @ weight).contiguous() if of_input else none,
        (rows.t() @ _rows(input)).contiguous() if of_weight else none.clone(),
        rows.sum(0) if of_bias and bias is not None else none.clone(),
    )


def dense_forward(input, weight, bias=None, activation="none"):
    """(activation(input weight^T + bias), what it was taken of).

    input: [..., inputs] float16, bfloat16, float32 or float64. weight: [outputs, inputs], and bias: [outputs] or None,
    of its dtype. activation: "none", "relu", "sigmoid" or "gelu" (its tanh form). Both results are [..., outputs];
    the second has no element but for sigmoid and gelu. Raises TypeError and ValueError.
    """
    function = _activation(activation)
    _check_input("dense", input)
    _check("dense", input, input.shape[-1], weight, bias)
    before = _product(input, weight, bias)
    output = before if function is None else function(before)
    return output, before if activation in _KEEPS else input.new_empty(0)


def dense_backward(
    grad_output,
    input,
    weight,
    bias,
    saved,
    activation="none",
    of_input=True,
    of_weight=True,
    of_bias=True,
):
    """(gradient of the input, of the weight, of the bias); without elements where not wanted, or there is no bias.

    saved: the forward's output for relu, its second result for sigmoid and gelu; else it is not looked at.
    """
    _activation(activation)
    _check_input("dense", input)
    _check("dense", input, input.shape[-1], weight, bias)
    _check_like("dense", grad_output, input, weight.shape[0])
    g = grad_output
    if activation != "none":
        _check_like("dense", saved, input, weight.shape[0])
        g = (g * _slope(saved, activation)).to(input.dtype)
    return _gradients(g, input, weight, bias, of_input, of_weight, of_bias)


class _Pair:
    """autograd and autocast of dense, as torch.library wants them."""

    name = "dense"

    def setup_context(self, ctx, inputs, output):
        """Keeps the operands, and what the activation's slope is known from."""
        input, weight, bias, activation = (*inputs, *(None, "none")[len(inputs) - 2 :])
        saved = output[0] if activation == "relu" else output[1]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(input, weight, bias, saved)
        ctx.activation = activation
        ctx.set_materialize_grads(False)

    def backward(self, ctx, grad, _):
        """Gradients of the forward's inputs, through the backward op."""
        if grad is None:
            return None, None, None, None
        input, weight, bias, saved = ctx.saved_tensors
        needed = (*ctx.needs_input_grad, False, False)[:3]
        found = torch.ops.apex.dense_backward(grad, input, weight, bias, saved, ctx.activation, *needed)
        return *(g if want else None for g, want in zip(found, needed, strict=True)), None

    def setup_double_context(self, ctx, inputs, output):
        """Keeps all inputs of the backward."""
        grad, input, weight, bias, _, *known = inputs
        ctx.save_for_backward(grad, input, weight, bias)
        ctx.known = (*known, *("none", True, True, True)[len(known) :])
        ctx.set_materialize_grads(False)

    def double_backward(self, ctx, *gradients):
        """By torch's own differentiable ops."""
        activation, *wanted = ctx.known

        def again(grad, input, weight, bias):
            if activation != "none":
                grad = grad * _slope(F.linear(input, weight, bias), activation).to(grad.dtype)
            return _gradients(grad, input, weight, bias, *wanted)

        of_grad, *rest = differentiate(again, ctx.saved_tensors, gradients)
        return of_grad, *rest, None, None, None, None, None

    def autocast(self, device_type, arguments, keywords):
        """All operands are of autocast's dtype."""
        return _cast(
            device_type,
            dict(zip(("input", "weight", "bias", "activation"), arguments, strict=False)) | keywords,
        )


def _cast(device_type, arguments):
    dtype = torch.get_autocast_dtype(device_type)
    casts = lambda t: isinstance(t, torch.Tensor) and t.is_floating_point() and t.dtype != torch.float64  # noqa: E731
    return {name: value.to(dtype) if casts(value) else value for name, value in arguments.items()}


PAIRS = (_Pair(),)
