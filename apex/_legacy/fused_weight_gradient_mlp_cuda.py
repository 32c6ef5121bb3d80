"""The functions of public apex's fused_weight_gradient_mlp_cuda. They record no gradients, as there."""

from __future__ import annotations

import torch

from apex._legacy._checks import floating
from apex._legacy._raw import raw as _raw
from apex._loader import bindings

bindings.load()
__all__ = ["wgrad_gemm_accum_fp16", "wgrad_gemm_accum_fp32"]


def _accumulate(function, dtypes, input, d_output, d_weight):
    floating(function, input=input, d_output=d_output, d_weight=d_weight)
    if d_weight.dtype not in dtypes:
        raise TypeError(f"{function}: d_weight must be {' or '.join(map(str, dtypes))}, not {d_weight.dtype}")
    torch.ops.apex.wgrad_gemm_accum(input, d_output, d_weight)


@_raw
def wgrad_gemm_accum_fp32(input_2d, d_output_2d, d_weight):
    """d_weight += d_output_2d^T input_2d: d_weight float32, the others float32, float16 or bfloat16."""
    _accumulate("wgrad_gemm_accum_fp32", (torch.float32,), input_2d, d_output_2d, d_weight)


@_raw
def wgrad_gemm_accum_fp16(input_2d, d_output_2d, d_weight):
    """The same with all three float16, or all three bfloat16."""
    _accumulate("wgrad_gemm_accum_fp16", (torch.float16, torch.bfloat16), input_2d, d_output_2d, d_weight)
