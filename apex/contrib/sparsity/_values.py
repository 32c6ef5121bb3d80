"""What is known of the values of a traced model: where their channels are."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from apex.contrib.sparsity._spaces import Space


@dataclasses.dataclass(frozen=True)
class Channels:
    """A tensor's channels: the spaces that follow one another along `dim` (from the right, so negative).

    rank: its number of dimensions, or None. batch: the same object for tensors with the same first dimension.
    flat: each channel is followed by an unknown number of positions, all in the last dimension.
    """

    parts: tuple[Space, ...]
    dim: int
    rank: int | None
    batch: object
    flat: bool = False

    @property
    def size(self):
        return sum(part.size for part in self.parts)

    @property
    def second(self):
        """Whether they are dimension 1, as a convolution's."""
        return self.rank is not None and self.rank + self.dim == 1 and not self.flat

    def freeze(self, why):
        for part in self.parts:
            part.freeze(why)


@dataclasses.dataclass(frozen=True)
class Attribute:
    """A parameter or buffer that the graph names; axes are counted from the right. expanded: it has more dimensions, or
    larger ones, than the tensor, and which is not known."""

    tensor: torch.Tensor
    name: str
    expanded: bool = False


@dataclasses.dataclass(frozen=True)
class Shape:
    of: Channels


@dataclasses.dataclass(frozen=True)
class Size:
    of: Channels
    index: Any
