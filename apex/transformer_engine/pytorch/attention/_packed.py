"""Sequences one behind the other, as a batch of the longest, and back."""

from __future__ import annotations

import torch


def lengths(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """[sequences] of where they begin, and the last one ends: [sequences + 1]."""
    return cu_seqlens[1:] - cu_seqlens[:-1]


def _places(cu_seqlens, longest, total):
    """(for every place of the batch its token, or `total` for one of padding; whether it is padding)"""
    steps = torch.arange(longest, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    padding = steps >= lengths(cu_seqlens).unsqueeze(1)
    return (cu_seqlens[:-1, None] + steps).masked_fill(padding, total).long(), padding


def unpack(tokens: torch.Tensor, cu_seqlens: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """([sequences, longest, heads, d], zeros where there is padding; where that is) of tokens [t, heads, d]."""
    places, padding = _places(cu_seqlens, longest, tokens.shape[0])
    with_zero = torch.cat([tokens, tokens.new_zeros((1, *tokens.shape[1:]))])
    return with_zero[places], padding


def pack(batch: torch.Tensor, cu_seqlens: torch.Tensor, total: int) -> torch.Tensor:
    """[total, heads, d] of a batch [sequences, longest, heads, d]; tokens of no sequence are zeros."""
    places, _ = _places(cu_seqlens, batch.shape[1], total)
    found = batch.new_zeros((total + 1, *batch.shape[2:]))
    return found.index_put((places.flatten(),), batch.flatten(0, 1))[:total]
