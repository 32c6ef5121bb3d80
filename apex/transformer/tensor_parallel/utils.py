"""Splitting the last dimension, and a vocabulary, among ranks."""

from __future__ import annotations

import torch

from apex.transformer.utils import divide


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    """Equal parts of a tensor.

    Args:
        tensor: [..., n].
        num_partitions: how many parts.
        contiguous_split_chunks: False: they are views.

    Returns:
        `num_partitions` tensors [..., n / num_partitions].

    Raises:
        ValueError: n is not divisible.
    """
    divide(tensor.shape[-1], num_partitions)
    chunks = tensor.chunk(num_partitions, dim=-1)  # as many of 0 elements, too
    return tuple(chunk.contiguous() for chunk in chunks) if contiguous_split_chunks else tuple(chunks)


class VocabUtility:
    """Which words a rank of a tensor parallel group holds: (first, behind the last)."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Of parts of that many words."""
        first = rank * per_partition_vocab_size
        return first, first + per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(
        global_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Of a vocabulary of that many words. Raises ValueError where the ranks do not divide it."""
        part = divide(global_vocab_size, world_size)
        return VocabUtility.vocab_range_from_per_partition_vocab_size(part, rank, world_size)


def refuse_create_graph(what):
    """Raises RuntimeError in a backward pass whose own gradients are wanted: they would be lost without a word."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"{what}: gradients of gradients (create_graph=True) are not computed")


def check_words(tensor, words, who):
    """Raises IndexError where a tensor on the CPU holds numbers that are no words. On a GPU the host would wait."""
    if tensor.device.type == "cpu" and tensor.numel() and not 0 <= tensor.min() <= tensor.max() < words:
        raise IndexError(f"{who}: words must be from 0 to {words - 1}")


def current_device() -> torch.device:
    """Where parameters and buffers are made: the current GPU, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
