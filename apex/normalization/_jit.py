"""What torch.jit sees of the norms: PyTorch's own ops, so that a trace or a script runs, and exports, without apex."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def plain_layer_norm(
    input,
    shape: list[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype,
):
    if weight is not None and weight.dtype != input.dtype:  # torch's own takes one dtype alone
        input, weight = input.float(), weight.float()
        if bias is not None:
            bias = bias.float()
    return F.layer_norm(input, shape, weight, bias, eps).to(dtype)


def manual_rms_norm(input, shape: list[int], weight: torch.Tensor | None, eps: float):
    dims = list(range(-len(shape), 0))
    wide = input.to(torch.float64 if input.dtype == torch.float64 else torch.float32)
    output = input * torch.rsqrt(wide.square().mean(dims, keepdim=True) + eps)
    if weight is None:
        return output
    if weight.dtype in (torch.float16, torch.bfloat16):
        output = output.to(weight.dtype)
    return weight * output


def plain_rms_norm(input, shape: list[int], weight: torch.Tensor | None, eps: float, dtype: torch.dtype):
    return manual_rms_norm(input, shape, weight, eps).to(dtype)
