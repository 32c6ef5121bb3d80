"""Products of matrices whose blocks have scales, by torch._scaled_mm where the card and this torch offer it.

Which blocks, formats and results they are for differs between releases and is not told anywhere, so a small product is
made once of each kind and compared.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from apex.reference import fp8 as reference

BLOCK = 128
_MULTIPLE = 16
# Of kinds that were tried: what rows of scales of square blocks are padded to, or 0: not offered.
_known: dict[tuple[torch.device, torch.dtype, torch.dtype, bool, bool, torch.dtype], int] = {}


def is_square(codes: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether blocks are 128 x 128, else 1 x 128; a matrix of one row has either."""
    return scale.shape[0] != codes.shape[0]


def product(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """a b^T of [m, k] and [n, k] codes by their blocks' scales, in `dtype`; None where that kind is not offered."""
    squares = is_square(a, a_scale), is_square(b, b_scale)
    padding = offered(a.device, a.dtype, b.dtype, *squares, dtype)
    if not padding:
        return None
    return _multiply(a, a_scale, b, b_scale, squares, dtype, padding)


@torch.compiler.assume_constant_result
def offered(
    device: torch.device,
    a: torch.dtype,
    b: torch.dtype,
    a_square: bool,
    b_square: bool,
    dtype: torch.dtype,
) -> int:
    """What rows of scales of square blocks are padded to, or 0 where products of that kind are not offered."""
    kind = device, a, b, a_square, b_square, dtype
    if kind not in _known:
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing:  # nothing may be compared now
            return 0
        _known[kind] = next((padding for padding in (1, 4) if _holds(*kind, padding)), 0)
    return _known[kind]


def _holds(device, a_dtype, b_dtype, a_square, b_square, dtype, padding):
    """Whether a product that has several blocks each way, their number no multiple of 4, and rests comes out right."""
    if a_square and b_square:
        return False
    generator = torch.Generator(device="cpu").manual_seed(0)

    def drawn(rows, square, of):
        values = torch.randn(rows, 304, generator=generator, dtype=torch.float32, device="cpu")
        values = values * torch.linspace(0.01, 3.0, 304, dtype=torch.float32, device="cpu")
        block = (BLOCK if square else 1, BLOCK)
        codes, scale = reference.quantize_blocks(values, of, block)
        return codes, scale, reference.dequantize_blocks(codes, scale, torch.float32, block)

    with torch.no_grad():
        a, a_scale, a_wide = drawn(144, a_square, a_dtype)
        b, b_scale, b_wide = drawn(272, b_square, b_dtype)
        given = (tensor.to(device) for tensor in (a, a_scale, b, b_scale))
        try:
            found = _multiply(*given, (a_square, b_square), dtype, padding).to("cpu", torch.float32)
        except (RuntimeError, ValueError, TypeError, NotImplementedError):
            return False
        wanted = a_wide @ b_wide.t()
        return bool((found - wanted).abs().max() <= 0.01 * wanted.abs().max())


def _multiply(a, a_scale, b, b_scale, squares, dtype, padding):
    rows, outputs = a.shape[0], b.shape[0]
    a, a_scale = _laid_out(a, a_scale, squares[0], padding)
    b, b_scale = _laid_out(b, b_scale, squares[1], padding)
    # As cublasLt sums such products: fast sums are of one scale alone.
    found = torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale.t(), out_dtype=dtype)
    return found if found.shape == (rows, outputs) else found[:rows, :outputs].contiguous()


def _laid_out(codes, scale, square, padding):
    """(codes with zeros up to sizes that the card takes, their scales as it reads them)

    Scales of 1 x 128 lie column behind column, those of square blocks row behind row.
    """
    more = [-size % _MULTIPLE for size in codes.shape]
    if any(more):
        codes = F.pad(codes.view(torch.uint8), (0, more[1], 0, more[0])).view(codes.dtype)
    tall, wide = -(-codes.shape[0] // (BLOCK if square else 1)), -(-codes.shape[1] // BLOCK)
    pitches = (-(-wide // padding) * padding, 1) if square else (1, tall)
    laid = torch.empty_strided((tall, wide), pitches, dtype=scale.dtype, device=scale.device)
    laid.fill_(1.0)[: scale.shape[0], : scale.shape[1]].copy_(scale)
    return codes, laid
