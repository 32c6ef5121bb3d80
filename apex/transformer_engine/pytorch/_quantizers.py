"""How a matrix becomes FP8 under each recipe."""

from __future__ import annotations

from typing import NamedTuple

import torch

from apex.transformer_engine.common.recipe import QParams
from apex.transformer_engine.pytorch import _casts, _formats
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

    def scale_of(self, matrix: torch.Tensor) -> torch.Tensor:
        """float32 of one element."""
        raise NotImplementedError

    def recorded(self) -> torch.Tensor | None:
        """Where the largest magnitude goes, or None."""
        return None

    def quantize(self, matrix: torch.Tensor, rows: bool, columns: bool) -> Quantized:
        """Of a matrix [m, k] of any dtype."""
        scale = self.scale_of(matrix)
        inverse = torch.ones_like(scale) / scale
        codes, transposed = _casts.cast(matrix, scale, self.dtype, self.recorded(), rows, columns)
        return Quantized(codes, inverse if rows else None, transposed, inverse if columns else None)


class Delayed(ByScale):
    """By tensor `index` of a layer's state; `record`: its largest magnitude goes into the history."""

    def __init__(
        self, dtype: torch.dtype, scale: torch.Tensor, scaling: Scaling, index: int, record: bool
    ) -> None:
        super().__init__(dtype)
        self._scale, self._scaling, self._index, self._record = scale, scaling, index, record

    def scale_of(self, matrix: torch.Tensor) -> torch.Tensor:
        return self._scale[self._index].clone()

    def recorded(self) -> torch.Tensor | None:
        return self._scaling.amax_history[0, self._index] if self._record else None


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
        self.dtype, self._options, self._square = dtype, options, dimensions == 2

    def quantize(self, matrix: torch.Tensor, rows: bool, columns: bool) -> Quantized:
        """Of a matrix [m, k] of any dtype."""
        options = self._options
        found = _casts.cast_blocks(
            matrix, self.dtype, self._square, rows, columns, options.power_2_scale, options.amax_epsilon
        )
        return Quantized(*found)
