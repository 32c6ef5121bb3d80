"""Dividing sizes and tensors among the ranks of a tensor parallel group."""

from __future__ import annotations

import torch

from apex.transformer import _collectives as collectives
from apex.transformer import parallel_state


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raises ValueError unless `denominator` divides `numerator`."""
    if numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """numerator / denominator. Raises ValueError where something is left over."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def split_tensor_into_1d_equal_chunks(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that all ranks of its tensor parallel group hold.

    Args:
        tensor: any shape; its elements are split evenly.

    Returns:
        [numel / ranks], a view where the tensor is contiguous.

    Raises:
        ValueError: the number of elements is not divisible by that of ranks.
    """
    flat = tensor.reshape(-1)
    size = divide(flat.numel(), parallel_state.get_tensor_model_parallel_world_size())
    return flat.narrow(0, size * parallel_state.get_tensor_model_parallel_rank(), size)


def gather_split_1d_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The reverse: the parts of all ranks behind each other, [ranks * numel], of parts of one size."""
    group = parallel_state.get_tensor_model_parallel_group()
    return collectives.all_gather(tensor.reshape(-1), group, "the parts of a split tensor")
