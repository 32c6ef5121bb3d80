"""The casts that layers use: the one place where they meet the ops behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from apex import _fp8
from apex._fp8 import dequantize, quantize, transpose
from apex.reference import fp8 as reference
from apex.reference.fp8 import BLOCK, current_scale, delayed_scale
from apex.reference.fp8 import record_amax as record

__all__ = [
    "Activation",
    "amax",
    "cast",
    "cast_blocks",
    "current_scale",
    "delayed_scale",
    "dequantize",
    "dequantize_blocks",
    "normalize",
    "quantize",
    "record",
    "transpose",
    "update_scales",
]


class Activation(NamedTuple):
    """What is cast in a matrix's place: `name` of it, gated that of one half of its columns times the other half.

    With `before`, which the activation was given, the matrix is the gradient of what the activation gave, and what is
    cast is the gradient of `before`.
    """

    name: str
    gated: bool
    before: torch.Tensor | None = None


def _pass(matrix, scale, dtype, amax, layouts, of):
    """_fp8's pass of (rows, columns, sums) in `layouts`; each result has no element where it is False."""
    name, gated, before = of or (None, False, None)
    return _fp8.pass_over(matrix, scale, dtype, amax, *layouts, before, name, gated)


def amax(matrix: torch.Tensor, of: Activation | None = None) -> torch.Tensor:
    """The largest magnitude of what is cast: float32 of one element; NaN left out. Writes nothing else."""
    made = torch.zeros(1, dtype=torch.float32, device=matrix.device)
    # Any scale and format: nothing is cast.
    _pass(matrix, torch.ones_like(made), torch.float8_e4m3fn, made, (False, False, False), of)
    return made.reshape(())


def cast(
    matrix: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    amax: torch.Tensor | None,
    rows: bool,
    columns: bool,
    of: Activation | None = None,
    sums: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(matrix * scale in FP8, its transpose, the sums of its columns), None what is not asked for, in one pass.

    of: what is cast in its place. amax becomes max(amax, max |what is cast|). Sums are made in float32, and have the
    matrix's dtype.
    """
    found = _pass(matrix, scale, dtype, amax, (rows, columns, sums), of)
    wanted = zip(found, (rows, columns, sums), strict=True)
    codes, transposed, total = (tensor if want else None for tensor, want in wanted)
    return codes, transposed, total


def normalize(
    matrix: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    centered: bool,
    zero_centered_gamma: bool,
    scale: torch.Tensor,
    dtype: torch.dtype,
    amax: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(norm * scale in FP8, mean, 1 / deviation) of rows, in one pass: layer norm where centered, else RMS norm."""
    if centered:
        return _fp8.layer_norm(matrix, weight, bias, eps, scale, dtype, amax, zero_centered_gamma)
    codes, rstd = _fp8.rms_norm(matrix, weight, eps, scale, dtype, amax, zero_centered_gamma)
    return codes, None, rstd


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
    block = (BLOCK if square else 1, BLOCK)
    found = _fp8.quantize_blocks(
        matrix, dtype, block, power_of_two, epsilon, rowwise=rows, columnwise=columns
    )
    wanted = rows, rows, columns, columns
    return tuple(tensor if want else None for tensor, want in zip(found, wanted, strict=True))


def dequantize_blocks(
    codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, block: tuple[int, int]
) -> torch.Tensor:
    """The numbers of codes [rows, columns], each times its block's element of `scale`, in `dtype`."""
    return _dequantize_blocks(codes, scale, block[0]).to(dtype)


# An op of its own: what torch's inductor makes of this on a CPU reads scales of other blocks where there are several.
@torch.library.custom_op(
    "apex_te::dequantize_blocks",
    mutates_args=(),
    schema="(Tensor codes, Tensor scale, int block_rows) -> Tensor",
)
def _dequantize_blocks(codes, scale, block_rows):
    return reference.dequantize_blocks(codes, scale, torch.float32, (block_rows, BLOCK))


@_dequantize_blocks.register_fake
def _(codes, scale, block_rows):
    return torch.empty(codes.shape, dtype=torch.float32, device=codes.device)


def update_scales(
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    maxima: Sequence[float],
    margin: float,
    algorithm: str,
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """(new scales, 1 / them) of delayed scaling, of all layers, in one launch; histories move on by a row, in place.

    histories: float32 [steps, n] each; scales: [n]; maxima: the largest number of each one's format.
    """
    sizes = [scale.numel() for scale in scales]
    history, scale = torch.cat(list(histories), 1), torch.cat(list(scales))
    largest = [number for number, size in zip(maxima, sizes, strict=True) for _ in range(size)]
    numbers = torch.tensor(largest, dtype=torch.float32, device=scale.device)
    inverse = torch.empty_like(scale)
    _fp8.update_scales(history, scale, inverse, numbers, margin, algorithm)
    torch._foreach_copy_(list(histories), list(history.split(sizes, 1)))
    return scale.split(sizes), inverse.split(sizes)
