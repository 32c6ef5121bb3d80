"""Casts to FP8 in plain PyTorch: the op over apex/reference/fp8.py."""

import torch

from apex.reference import fp8
from apex.reference.bias_activation import ACTIVATIONS

NO_DERIVATIVE = True


def _check(input, scale, amax, dtype, bias_gradient, before, activation, gated):
    name = "fp8_quantize"
    fp8.check_cast(name, input, scale, dtype, amax)
    if activation == "none":
        if gated or before is not None:
            raise ValueError(f"{name}: without an activation there is no `before`, and no gate")
        return
    if activation not in ACTIVATIONS:
        raise ValueError(
            "bias_activation: the activation must be silu, gelu, quick_gelu, relu, squared_relu or sigmoid, not "
            f"{activation!r}"
        )
    columns = input.shape[-1]
    if before is None:
        if gated and columns % 2:
            raise ValueError(f"{name}: a gated activation halves the last dimension, which is {columns}")
        if bias_gradient:
            raise ValueError(f"{name}: a bias gradient is of a gradient, not of an activation: give `before`")
        return
    if before.dtype != input.dtype:
        raise TypeError(f"{name}: `before` is {before.dtype} but the input {input.dtype}")
    if before.device != input.device:
        raise ValueError(f"{name}: `before` is on {before.device} but the input is on {input.device}")
    wanted = [*input.shape[:-1], columns * (2 if gated else 1)]
    if list(before.shape) != wanted:
        raise ValueError(f"{name}: `before` has shape {list(before.shape)}, not {wanted}")


def fp8_quantize(
    input,
    scale,
    amax,
    dtype,
    rowwise=True,
    columnwise=False,
    bias_gradient=False,
    before=None,
    activation="none",
    gated=False,
    power_of_two=False,
    epsilon=0.0,
):
    """(rows, columns, grad_bias, scale_inv): y * scale in FP8, its transpose, sums of y's columns, each empty where
    nobody asked for it.

    y is the input [..., columns], float32, float16 or bfloat16; with `activation`, f of it, gated f(x1) * x2 of its
    halves; with `before` too, the gradient of `before` from the input, the gradient of f(before). scale: float32, one
    element, or None: it is `fp8.current_scale` of max |y|, with power_of_two and epsilon as there, and scale_inv, a
    scalar, is 1 / it; else that is empty. amax: float32, one element, or None, becomes max(amax, max |y|). dtype: FP8.
    rows has y's shape, columns [y's columns, rows], grad_bias [y's columns] of the input's dtype. Raises ValueError,
    TypeError, RuntimeError where the input asks for a gradient.
    """
    _check(input, scale, amax, dtype, bias_gradient, before, activation, gated)
    made = input
    if activation != "none":
        made = (
            fp8.activated(input, activation, gated)
            if before is None
            else fp8.activation_gradient(input, before, activation, gated)
        )
    scale_inv = torch.empty(0, dtype=torch.float32, device=input.device)
    if scale is None:
        largest = fp8.FORMATS[dtype].maximum
        scale = fp8.current_scale(fp8.largest_magnitude(made), largest, power_of_two, epsilon)
        scale_inv = torch.ones_like(scale) / scale
    q = fp8.cast(made, scale, dtype, amax)
    rows = q if rowwise else q.new_empty(0)
    columns = fp8.transpose(q) if columnwise else q.new_empty(0)
    grad_bias = fp8.column_sums(made).to(input.dtype) if bias_gradient else input.new_empty(0)
    return rows, columns, grad_bias, scale_inv
