"""How a matrix becomes FP8 under each recipe."""

from __future__ import annotations

from typing import NamedTuple

import torch

from apex.transformer_engine.common.recipe import QParams
from apex.transformer_engine.pytorch import _casts, _formats
from apex.transformer_engine.pytorch._scaling import Scaling

BLOCK = 128


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

    def scale_of(self, matrix: torch.Tensor) -> torch.Tensor:
        """float32 of one element."""
        raise NotImplementedError

    def quantize(self, matrix: torch.Tensor, rows: bool, columns: bool) -> Quantized:
        """Of a matrix [m, k] of any dtype."""
        scale = self.scale_of(matrix)
        inverse = torch.ones_like(scale) / scale
        codes = _casts.quantize(matrix, scale, self.dtype)
        return Quantized(
            codes if rows else None,
            inverse if rows else None,
            _casts.transpose(codes) if columns else None,
            inverse if columns else None,
        )


class Delayed(ByScale):
    """By tensor `index` of a layer's state; `record`: its largest magnitude goes into the history."""

    def __init__(
        self, dtype: torch.dtype, scale: torch.Tensor, scaling: Scaling, index: int, record: bool
    ) -> None:
        super().__init__(dtype)
        self._scale, self._scaling, self._index, self._record = scale, scaling, index, record

    def scale_of(self, matrix: torch.Tensor) -> torch.Tensor:
        if self._record:
            _casts.record(self._scaling.amax_history[0, self._index], matrix)
        return self._scale[self._index].clone()


class Current(ByScale):
    """By the largest magnitude of the matrix itself."""

    def __init__(self, dtype: torch.dtype, options: QParams) -> None:
        super().__init__(dtype)
        self._options = options

    def scale_of(self, matrix: torch.Tensor) -> torch.Tensor:
        largest = _formats.largest(self.dtype)
        options = self._options
        return _casts.current_scale(_casts.amax(matrix), largest, options.power_2_scale, options.amax_epsilon)


class Blocks:
    """A scale for every 1 x 128 numbers (dimensions 1), or 128 x 128 (dimensions 2)."""

    def __init__(self, dtype: torch.dtype, options: QParams, dimensions: int) -> None:
        self.dtype, self._options = dtype, options
        self._block = (BLOCK if dimensions == 2 else 1, BLOCK)

    def quantize(self, matrix: torch.Tensor, rows: bool, columns: bool) -> Quantized:
        """Of a matrix [m, k] of any dtype. Blocks of a transpose are its own, but where they are square."""
        square = self._block[0] == BLOCK
        codes, scale = self._cast(matrix) if rows or square else (None, None)
        transposed = column_scale = None
        if columns and square:
            transposed, column_scale = _casts.transpose(codes), scale.t().contiguous()  # type: ignore[union-attr]
        elif columns:
            transposed, column_scale = self._cast(matrix.t().contiguous())
        return Quantized(codes, scale, transposed, column_scale)

    def _cast(self, matrix):
        options = self._options
        return _casts.quantize_blocks(
            matrix, self.dtype, self._block, options.power_2_scale, options.amax_epsilon
        )
