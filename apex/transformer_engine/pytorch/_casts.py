"""The casts that layers use: the one place where they meet the ops behind them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from apex.transformer_engine.pytorch import _plain_casts as plain
from apex.transformer_engine.pytorch._plain_casts import (
    current_scale,
    delayed_scale,
    dequantize,
    dequantize_blocks,
)
from apex.transformer_engine.pytorch._plain_casts import largest_magnitude as amax
from apex.transformer_engine.pytorch._plain_casts import record_amax as record

__all__ = [
    "amax",
    "cast",
    "cast_blocks",
    "current_scale",
    "delayed_scale",
    "dequantize",
    "dequantize_blocks",
    "record",
    "transpose",
    "update_scales",
]
transpose = plain.transpose


def cast(
    matrix: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    amax: torch.Tensor | None,
    rows: bool,
    columns: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(matrix * scale in FP8, its transpose), None what is not asked for; amax becomes max(amax, max |matrix|)."""
    codes = plain.quantize(matrix, scale, dtype, amax)
    return codes if rows else None, plain.transpose(codes) if columns else None


def cast_blocks(
    matrix: torch.Tensor,
    dtype: torch.dtype,
    square: bool,
    rows: bool,
    columns: bool,
    power_of_two: bool,
    epsilon: float,
) -> tuple[torch.Tensor | None, ...]:
    """(codes, what each block is multiplied with, the same of the transpose), None what is not asked for.

    Blocks are 1 x 128, or square: 128 x 128. Those of a transpose are its own, but where they are square.
    """
    block = (plain.BLOCK if square else 1, plain.BLOCK)
    found: list[torch.Tensor | None] = [None] * 4
    if rows or square:
        codes, scale_inv = plain.quantize_blocks(matrix, dtype, block, power_of_two, epsilon)
        found[:2] = (codes, scale_inv) if rows else (None, None)
    if columns and square:
        found[2:] = plain.transpose(codes), scale_inv.t().contiguous()
    elif columns:
        found[2:] = plain.quantize_blocks(matrix.t().contiguous(), dtype, block, power_of_two, epsilon)
    return tuple(found)


def update_scales(
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    maxima: Sequence[float],
    margin: float,
    algorithm: str,
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """(new scales, 1 / them) of delayed scaling, of all layers; histories move on by a row, in place.

    histories: float32 [steps, n] each; scales: [n]; maxima: the largest number of each one's format.
    """
    made = [scale.clone() for scale in scales]
    inverses = [torch.empty_like(scale) for scale in made]
    plain.update_scales(histories, made, inverses, list(maxima), margin, algorithm)
    return made, inverses
