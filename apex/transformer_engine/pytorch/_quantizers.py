"""How a matrix becomes FP8 under each recipe."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from apex.transformer_engine.common.recipe import QParams
from apex.transformer_engine.pytorch import _casts
from apex.transformer_engine.pytorch._casts import Activation
from apex.transformer_engine.pytorch._scaling import Scaling


class Quantized(NamedTuple):
    """A matrix in FP8, and its transpose, each None where nobody wants it.

    rows [m, k] and columns [k, m] are contiguous. row_scale and column_scale are what their numbers are multiplied with
    to be what they were: float32 of one element, or one for every block of 128 numbers (1 x 128 or 128 x 128).
    """

    rows: torch.Tensor | None
    row_scale: torch.Tensor | None
    columns: torch.Tensor | None
    column_scale: torch.Tensor | None


class ByScale:
    """One scale for all. What delayed and current scaling share."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def quantize(
        self, matrix: torch.Tensor, rows: bool, columns: bool, of: Activation | None = None
    ) -> Quantized:
        """Of a matrix [m, k], or of what `of` makes of it."""
        return self.quantize_and_sum(matrix, rows, columns, False, of)[0]

    def quantize_and_sum(
        self, matrix: torch.Tensor, rows: bool, columns: bool, sums: bool, of: Activation | None = None
    ) -> tuple[Quantized, torch.Tensor | None]:
        """The same, and with `sums` the sums of the columns of what is cast, before its scale."""
        raise NotImplementedError


class Delayed(ByScale):
    """By tensor `index` of a layer's state; `record`: its largest magnitude goes into the history."""

    def __init__(
        self,
        dtype: torch.dtype,
        scale: torch.Tensor,
        scaling: Scaling,
        index: int,
        record: bool,
        scalars: tuple[Any, ...] | None = None,
    ) -> None:
        super().__init__(dtype)
        self._scale, self._scaling, self._index, self._record = scale, scaling, index, record
        self._known = scalars  # what `scaling` says of `scale`; None: it is asked when something is cast

    def _scalars(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(the scale, 1 / it, where the largest magnitude goes or None)"""
        scales, inverses, newest = self._known or self._scaling.scalars(self._scale)
        index = self._index
        return scales[index], inverses[index], newest[index] if self._record else None

    def quantize_and_sum(
        self, matrix: torch.Tensor, rows: bool, columns: bool, sums: bool, of: Activation | None = None
    ) -> tuple[Quantized, torch.Tensor | None]:
        scale, inverse, recorded = self._scalars()
        codes, transposed, total = _casts.cast(
            matrix, scale, self.dtype, recorded, rows, columns, of, sums
        )  # fmt: skip
        return Quantized(codes, inverse if rows else None, transposed, inverse if columns else None), total

    def quantize_norm(
        self,
        matrix: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        options: tuple[float, bool, bool],
        columns: bool,
    ) -> tuple[Quantized, torch.Tensor | None, torch.Tensor]:
        """(the norm of a matrix's rows, mean, 1 / deviation); options: eps, centered, zero_centered_gamma."""
        scale, inverse, recorded = self._scalars()
        codes, mean, rstd = _casts.normalize(matrix, weight, bias, *options, scale, self.dtype, recorded)
        turned = (_casts.transpose(codes), inverse) if columns else (None, None)
        return Quantized(codes, inverse, *turned), mean, rstd


class Current(ByScale):
    """By the largest magnitude of the matrix itself, which is looked for first, by the op that casts."""

    def __init__(self, dtype: torch.dtype, options: QParams) -> None:
        super().__init__(dtype)
        self._options = options

    def quantize_and_sum(
        self, matrix: torch.Tensor, rows: bool, columns: bool, sums: bool, of: Activation | None = None
    ) -> tuple[Quantized, torch.Tensor | None]:
        options = self._options
        codes, turned, total, inverse = _casts.cast_by_own_scale(
            matrix, self.dtype, rows, columns, of, sums, options.power_2_scale, options.amax_epsilon
        )
        by_row = (codes, inverse) if rows else (None, None)
        return Quantized(*by_row, *((turned, inverse) if columns else (None, None))), total if sums else None


class Blocks:
    """A scale for every 1 x 128 numbers (dimensions 1), or 128 x 128 (dimensions 2)."""

    def __init__(self, dtype: torch.dtype, options: QParams, dimensions: int) -> None:
        self.dtype, self._options, self._square = dtype, options, dimensions == 2

    def quantize(self, matrix: torch.Tensor, rows: bool, columns: bool) -> Quantized:
        """Of a matrix [m, k] of any dtype."""
        options = self._options
        found = _casts.cast_blocks(
            matrix, self.dtype, self._square, rows, columns, options.power_2_scale, options.amax_epsilon
        )
        return Quantized(*found)

    def quantize_and_sum(
        self, matrix: torch.Tensor, rows: bool, columns: bool, sums: bool
    ) -> tuple[Quantized, torch.Tensor | None]:
        """The same, and with `sums` the sums of the columns in float32."""
        total = matrix.sum(0, dtype=torch.float32) if sums else None
        return self.quantize(matrix, rows, columns), total
