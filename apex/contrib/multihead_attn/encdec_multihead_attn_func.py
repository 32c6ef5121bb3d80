"""Attention of queries to other keys with its projections, as public apex's function of that name."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from apex.contrib.multihead_attn import _core


class EncdecAttnFunc:
    """Has the face of an autograd.Function; see SelfAttnFunc."""

    @staticmethod
    def apply(
        use_time_mask: bool,
        is_training: bool,
        heads: int,
        scale: float | None,
        inputs_q: torch.Tensor,
        inputs_kv: torch.Tensor,
        input_weights_q: torch.Tensor,
        input_weights_kv: torch.Tensor,
        output_weights: torch.Tensor,
        input_biases_q: torch.Tensor | None,
        input_biases_kv: torch.Tensor | None,
        output_biases: torch.Tensor | None,
        mask: torch.Tensor | None,
        dropout_prob: float,
    ) -> torch.Tensor:
        """[Tq, B, C], of inputs_q [Tq, B, C] and inputs_kv [Tk, B, C].

        input_weights_q: [C, C]; input_weights_kv: [2 C, C], for each head the rows of its key and value side by
        side; output_weights: [C, C]. Biases: [C], [2 C], [C], or None. mask: [B, Tk], or [Tq, Tk] with use_time_mask:
        not 0 where a key is left out; or None. dropout_prob: of the probabilities, where is_training.

        Raises ValueError for a mask that does not fit.
        """
        q = functional.linear(inputs_q, input_weights_q, input_biases_q)
        kv = functional.linear(inputs_kv, input_weights_kv, input_biases_kv)
        mask = _core.mask_of_scores(mask, use_time_mask, False, q.dtype)
        context = _core.attention(q, kv, heads, mask, dropout_prob if is_training else 0.0, scale)
        return functional.linear(context, output_weights, output_biases)

    @staticmethod
    def forward(ctx, *arguments: Any) -> torch.Tensor:
        """As `apply`."""
        return EncdecAttnFunc.apply(*arguments)


encdec_attn_func = EncdecAttnFunc.apply
