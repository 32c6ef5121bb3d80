"""Products of FP8 matrices: torch._scaled_mm where the device multiplies FP8, else the exact emulation."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from apex.transformer_engine.pytorch import _block_products, _casts, _formats

_MULTIPLE = 16  # what torch._scaled_mm asks of sizes
_SUMS_WIDE = "dtype" in torch.ops.aten.mm.overloads() and torch.version.hip is None


def product(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    accurate: bool = True,
) -> torch.Tensor:
    """a b^T + bias.

    Args:
        a, b: [m, k], [n, k], FP8, contiguous.
        a_scale, b_scale: what their numbers are multiplied with: float32 of one element each, or one for every
            block of 128 numbers (1 x 128 or 128 x 128).
        dtype: of the result: float16, bfloat16, float32.
        bias: [n], or None.
        accurate: False: a card may sum with fewer bits.

    Returns:
        [m, n]
    """
    whole = a_scale.dim() == b_scale.dim() == 0
    card = _formats.multiplies(a.device) and a.numel() > 0 and b.shape[0] > 0
    if whole and card:
        return _by_card(a, a_scale, b, b_scale, dtype, bias, accurate)
    if whole:
        found = _widened(a, b) * (a_scale * b_scale)
    else:
        blocks = card and a_scale.dim() == b_scale.dim() == 2
        found = _block_products.product(a, a_scale, b, b_scale, dtype) if blocks else None
        if found is None:
            found = _dequantized(a, a_scale) @ _dequantized(b, b_scale).t()
    if bias is not None:
        found = found + bias
    return _in(dtype, found)


def _in(dtype, found):
    """In a dtype, by no op where it is in that: torch 2.11 compiles a Function with all that its forward makes among
    its outputs, and sends the gradient of one that is there twice to the wrong one."""
    return found if found.dtype == dtype else found.to(dtype)


def _widened(a, b):
    """a b^T of codes, in float32. bfloat16 holds every number of the formats."""
    wide = torch.bfloat16 if _sums_wide(a) else torch.float32
    return summed_wide(a.to(wide), b.to(wide))


def summed_wide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b^T in float32, of [m, k] and [n, k] of one floating-point dtype."""
    if a.dtype != torch.float32 and _sums_wide(a):
        return torch.mm(a, b.t(), out_dtype=torch.float32)
    return _wide(a) @ _wide(b).t()


def _sums_wide(matrix):
    """Whether products of halves there give float32."""
    return matrix.device.type == "cuda" and _SUMS_WIDE


def _wide(codes):
    return codes.to(torch.float32)


def _dequantized(codes, scale):
    if scale.dim() == 0:
        return _casts.dequantize(codes, scale, torch.float32)
    block = (1 if scale.shape[0] == codes.shape[0] else 128, 128)
    return _casts.dequantize_blocks(codes, scale, torch.float32, block)


def _padded(codes, rows):
    """With zeros up to sizes that the card takes; rows: their number too."""
    more = [-size % _MULTIPLE for size in codes.shape]
    if not more[1] and not (rows and more[0]):
        return codes
    return F.pad(codes.view(torch.uint8), (0, more[1], 0, more[0] if rows else 0)).view(codes.dtype)


def _aligned(scale):
    """cublasLt takes a scale on a multiple of 16 bytes alone; one of a layer's several may lie elsewhere."""
    if torch.compiler.is_compiling():  # whose scales are tensors of their own; it cannot trace where they lie
        return scale
    return scale.clone() if scale.storage_offset() % 4 else scale


def _by_card(a, a_scale, b, b_scale, dtype, bias, accurate):
    outputs, inner = b.shape
    fused = bias is not None and bias.dtype == dtype != torch.float32 and outputs % _MULTIPLE == 0
    if outputs % _MULTIPLE or inner % _MULTIPLE:
        a, b = _padded(a, False), _padded(b, True)
    fast = not accurate and torch.version.hip is None
    scales = _aligned(a_scale), _aligned(b_scale)
    found = torch._scaled_mm(
        a, b.t(), *scales, bias=bias.contiguous() if fused else None, out_dtype=dtype, use_fast_accum=fast
    )
    found = found if found.shape[1] == outputs else found[:, :outputs].contiguous()
    return found if fused or bias is None else _in(dtype, found + bias)
