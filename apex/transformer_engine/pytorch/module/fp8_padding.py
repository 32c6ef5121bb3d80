"""te.Fp8Padding and te.Fp8Unpadding: parts of rows, as of experts, grown to multiples of 16 rows and cut again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from apex import _symbolic as symbolic

_MULTIPLE = 16


class _Parts(nn.Module):
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size or _MULTIPLE

    def _grown(self, m_splits: Sequence[int]) -> list[int]:
        """The parts' sizes, as multiples."""
        if len(m_splits) != self.num_gemms:
            raise ValueError(
                f"{type(self).__name__}: m_splits has {len(m_splits)} parts, not {self.num_gemms}"
            )
        return [-(-size // self.align_size) * self.align_size for size in m_splits]


def _check(name: str, inp: torch.Tensor, sizes: Sequence[int]) -> None:
    if inp.dim() != 2 or inp.shape[0] != sum(sizes):
        raise ValueError(
            f"{name}: the input must have {sum(sizes)} rows in 2 dimensions; it is {list(inp.shape)}"
        )


class Fp8Padding(_Parts):
    """Each of num_gemms parts of the rows gets rows of 0 behind it, up to a multiple of align_size (None: 16).

    Layers here take any sizes; programs call it for the public engine's.
    """

    def forward(self, inp: torch.Tensor, m_splits: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        """(inp [rows, columns] with those rows, the sizes of its parts); m_splits: how many rows each part has.

        Raises ValueError where parts or rows are of another number.
        """
        node = symbolic.leaf(self, inp, m_splits)
        if node is not None:
            return node
        grown = self._grown(m_splits)
        _check("Fp8Padding", inp, m_splits)
        if grown == list(m_splits):
            return inp, grown
        parts = zip(inp.split(list(m_splits)), m_splits, grown, strict=True)
        return torch.cat(
            [nn.functional.pad(part, (0, 0, 0, after - size)) for part, size, after in parts]
        ), grown


class Fp8Unpadding(_Parts):
    """Cuts off the rows that Fp8Padding put behind each part."""

    def forward(self, inp: torch.Tensor, m_splits: Sequence[int]) -> torch.Tensor:
        """[rows, columns] of inp as Fp8Padding gives it; m_splits: as it was given. Raises ValueError as it does."""
        node = symbolic.leaf(self, inp, m_splits)
        if node is not None:
            return node
        grown = self._grown(m_splits)
        _check("Fp8Unpadding", inp, grown)
        if grown == list(m_splits):
            return inp
        return torch.cat([part[:size] for part, size in zip(inp.split(grown), m_splits, strict=True)])
