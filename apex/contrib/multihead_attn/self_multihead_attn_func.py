"""Self-attention with its projections, as public apex's function of that name."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from apex.contrib.multihead_attn import _core


class SelfAttnFunc:
    """Has the face of an autograd.Function; the ops behind are differentiable by themselves, and torch.compile traces
    them."""

    @staticmethod
    def apply(
        use_time_mask: bool,
        is_training: bool,
        heads: int,
        scale: float | None,
        inputs: torch.Tensor,
        input_weights: torch.Tensor,
        output_weights: torch.Tensor,
        input_biases: torch.Tensor | None,
        output_biases: torch.Tensor | None,
        mask: torch.Tensor | None,
        is_additive_mask: bool,
        dropout_prob: float,
    ) -> torch.Tensor:
        """[T, B, C], of inputs [T, B, C].

        input_weights: [3 C, C], for each head the rows of its query, key and value side by side. output_weights:
        [C, C]. input_biases, output_biases: [3 C] and [C], or None. mask: [B, T], or [T, T] with use_time_mask: not 0
        where a key is left out, or with is_additive_mask numbers that are added to the scores, -inf to leave a key
        out; or None. dropout_prob: of the probabilities, where is_training. A query whose keys are all left out
        gives what the output's bias is.

        Raises ValueError and TypeError for a mask that does not fit.
        """
        projected = functional.linear(inputs, input_weights, input_biases)
        mask = _core.mask_of_scores(mask, use_time_mask, is_additive_mask, projected.dtype)
        dropout = dropout_prob if is_training else 0.0
        context = _core.attention(projected, None, heads, mask, dropout, scale)
        return functional.linear(context, output_weights, output_biases)

    @staticmethod
    def forward(ctx, *arguments: Any) -> torch.Tensor:
        """As `apply`."""
        return SelfAttnFunc.apply(*arguments)


self_attn_func = SelfAttnFunc.apply
