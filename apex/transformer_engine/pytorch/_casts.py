"""The casts that layers use: the one place where they meet the ops behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from apex import _fp8
from apex._fp8 import dequantize, quantize, transpose
from apex._functional import entry, is_traced
from apex.reference import fp8 as reference
from apex.reference.fp8 import BLOCK, current_scale, delayed_scale
from apex.reference.fp8 import record_amax as record

__all__ = [
    "Activation",
    "amax",
    "cast",
    "cast_blocks",
    "cast_by_own_scale",
    "current_scale",
    "delayed_scale",
    "dequantize",
    "dequantize_blocks",
    "has_new_scales",
    "new_scales",
    "normalize",
    "quantize",
    "record",
    "transpose",
    "update_scales",
]

_new_scales = entry("fp8_new_scales")


class Activation(NamedTuple):
    """What is cast in a matrix's place: `name` of it, gated that of one half of its columns times the other half.

    With `before`, which the activation was given, the matrix is the gradient of what the activation gave, and what is
    cast is the gradient of `before`.
    """

    name: str
    gated: bool
    before: torch.Tensor | None = None


_AS_IT_IS = ("none", False, None)


def amax(matrix: torch.Tensor, of: Activation | None = None) -> torch.Tensor:
    """The largest magnitude of what is cast: float32 of one element; NaN left out. Writes nothing else."""
    made = torch.zeros(1, dtype=torch.float32, device=matrix.device)
    # Any scale and format: nothing is cast.
    cast(matrix, torch.ones_like(made), torch.float8_e4m3fn, made, False, False, of)
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
    name, gated, before = of or _AS_IT_IS
    codes, turned, total, _ = _fp8.cast(
        matrix, scale, amax, dtype, rows, columns, sums, before, name, gated, False, 0.0
    )
    return codes if rows else None, turned if columns else None, total if sums else None


def cast_by_own_scale(
    matrix: torch.Tensor,
    dtype: torch.dtype,
    rows: bool,
    columns: bool,
    of: Activation | None,
    sums: bool,
    power_of_two: bool,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same by `current_scale` of the largest magnitude, and 1 / it: a scalar. No element of what is not asked for.

    One call makes both passes, and the scale between them on the device.
    """
    name, gated, before = of or _AS_IT_IS
    return _fp8.cast(
        matrix, None, None, dtype, rows, columns, sums, before, name, gated, power_of_two, epsilon
    )  # fmt: skip


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


def has_new_scales() -> bool:
    """Whether new_scales may be asked: nothing looks on, and C++ is there."""
    return _new_scales is not None and not is_traced() and not torch._C._len_torch_dispatch_stack()


def new_scales(
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    maxima: torch.Tensor,
    margin: float,
    algorithm: str,
) -> Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None:
    """As update_scales, for each history by itself: (new scales, 1 / them, the same as products take them).

    Versions of histories stay as they were. Only where has_new_scales; None, and nothing done, where no kernel serves.
    """
    return _new_scales(maxima, histories, scales, margin, algorithm == "most_recent")


def update_scales(
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    maxima: torch.Tensor,
    margin: float,
    algorithm: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(new scales, 1 / them) of delayed scaling, of all layers, in one launch; histories move on, in place.

    histories: float32 [steps, n] each; scales: [n] each. maxima: the largest number of the format of each tensor, [all
    n], as is what is given back.
    """
    return _fp8.multi_update_scales(histories, scales, maxima, margin, algorithm)
