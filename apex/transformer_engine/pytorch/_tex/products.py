"""te_gemm of transformer_engine_extensions: a product with its bias, its activation and their gradients."""

from __future__ import annotations

import torch

from apex import _fp8
from apex.transformer_engine.pytorch import _products, constants
from apex.transformer_engine.pytorch._tex import casts
from apex.transformer_engine.pytorch._tex.checks import raw as _raw

_ops = torch.ops.apex
_NAME = "transformer_engine_extensions.te_gemm"


@_raw
def te_gemm(
    A,
    A_scale_inverse,
    A_type,
    transa,
    B,
    B_scale_inverse,
    B_type,
    transb,
    D,
    D_scale,
    D_type,
    D_amax,
    bias,
    bias_type,
    pre_gelu_out,
    grad,
    workspace=None,
    workspaceSize=0,
    accumulate=False,
    use_split_accumulator=False,
    math_sm_count=0,
):
    """D [n, m] = b a^T, of a [m, k], which is A, or A^T where transa is False, and b [n, k], B^T where transb is True.

    FP8 ones are codes (uint8) of A_type and B_type with what they are multiplied with. bias [m] is added; to
    pre_gelu_out [n, m] goes what gelu is taken of. grad: pre_gelu_out is read, and the product multiplied with gelu's
    slope there; bias becomes the sums of that over n, [m], or without it those of b over k, [n]. accumulate: D is
    added. D of FP8: the product times D_scale, whose largest magnitude D_amax records. bias, pre_gelu_out, D_scale,
    D_amax without an element are none. workspace, workspaceSize, math_sm_count: not looked at. Raises TypeError,
    ValueError.
    """
    a, b = _matrix("A", A, A_type, transa), _matrix("B", B, B_type, not transb)
    if a.shape[1] != b.shape[1] or D.shape != (b.shape[0], a.shape[0]):
        raise ValueError(
            f"{_NAME}: D {list(D.shape)} is not the product of {list(b.shape)} and {list(a.shape)}^T"
        )
    bias, before = casts.given(bias), casts.given(pre_gelu_out)
    quantized = casts.is_fp8(constants.torch_dtype(D_type, D.device))
    if quantized and accumulate:
        raise ValueError(f"{_NAME}: nothing is accumulated in FP8: accumulate must be False")
    scales = _scale("A", A_scale_inverse, a), _scale("B", B_scale_inverse, b)
    plain = bias is None and before is None and not accumulate and not quantized
    made = _multiply(a, b, scales, D.dtype if plain else torch.float32, use_split_accumulator)
    if grad:
        made = _gradients(made, b, scales[1], bias, before)
    else:
        made = made if bias is None else made + bias
        if before is not None:
            before.copy_(made)
            made = _ops.bias_activation_forward(made, None, "gelu", False)
    if quantized:
        casts.cast_into(_NAME, made, D_scale, D_amax, None, [(D, False)], D_type)
    else:
        D.add_(made) if accumulate else D.copy_(made)


def _matrix(name, tensor, dtype, as_it_is):
    """[rows, k], FP8 where dtype is."""
    if tensor.dim() != 2:
        raise ValueError(f"{_NAME}: {name} must be a matrix; its shape is {list(tensor.shape)}")
    found = casts.codes_of(_NAME, tensor, dtype)
    if as_it_is:
        return found
    return _fp8.transpose(found) if casts.is_fp8(found.dtype) else found.t()


def _scale(name, inverse, matrix):
    """What codes are multiplied with, of no dimension; None of what are none."""
    if not casts.is_fp8(matrix.dtype):
        return None
    inverse = casts.given(inverse)
    if inverse is None or inverse.numel() != 1:
        raise ValueError(f"{_NAME}: {name}_scale_inverse must have one element where {name} is FP8")
    return inverse.reshape(())


def _multiply(a, b, scales, dtype, accurate):
    """b a^T in `dtype`."""
    if casts.is_fp8(a.dtype) and casts.is_fp8(b.dtype):
        given = b.contiguous(), scales[1], a.contiguous(), scales[0]
        return _products.product(*given, dtype, accurate=accurate)
    if a.dtype != b.dtype or not a.is_floating_point():
        raise TypeError(
            f"{_NAME}: A and B must be of one floating-point dtype, or of FP8, not {a.dtype} and {b.dtype}"
        )
    return torch.mm(b, a.t()) if dtype == a.dtype else _products.summed_wide(b, a).to(dtype)


def _gradients(made, b, scale, bias, before):
    if before is not None:
        made = _ops.bias_activation_backward(made, before.to(made.dtype), None, "gelu", False, False)[0]
    if bias is not None and before is not None:
        bias.copy_(made.sum(0))
    elif bias is not None:
        wide = b.to(torch.float32) if scale is None else _fp8.dequantize(b, scale, torch.float32)
        bias.copy_(wide.sum(1))
    return made
