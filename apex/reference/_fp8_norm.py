"""What fp8_layer_norm and fp8_rms_norm share: checks, and a norm in float32 that is cast."""

import torch

from apex.reference import _norm, fp8


def _check(name, input, weight, bias, scale, amax, dtype):
    fp8.check_cast(name, input, scale, dtype, amax)
    for what, numbers in (("weight", weight), ("bias", bias)):
        if numbers is None:
            continue
        if numbers.dtype not in fp8.FLOATS:
            raise TypeError(f"{name} takes float32, float16 and bfloat16, not {numbers.dtype}")
        if list(numbers.shape) != [input.shape[-1]]:
            raise ValueError(
                f"{name}: {what} has shape {list(numbers.shape)} but the input ends in {input.shape[-1]}"
            )
        if numbers.device != input.device:
            raise ValueError(f"{name}: {what} is on {numbers.device} but the input is on {input.device}")
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        raise TypeError(f"{name}: weight and bias must have one dtype")


def forward(name, input, weight, bias, eps, scale, amax, dtype, zero_centered_gamma, centered):
    """(codes, mean or None, rstd) of a norm over the last dimension."""
    _check(name, input, weight, bias, scale, amax, dtype)
    if weight is not None:
        weight = weight.to(torch.float32) + (1 if zero_centered_gamma else 0)
    bias = None if bias is None else bias.to(torch.float32)
    made, mean, rstd = _norm.forward(input, input.shape[-1:], weight, bias, eps, torch.float32, centered)
    return fp8.cast(made, scale, dtype, amax), mean, rstd
