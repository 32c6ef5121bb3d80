"""self_attn_func with the arguments of public apex's fast form."""

from __future__ import annotations

from typing import Any

import torch

from apex.contrib.multihead_attn.self_multihead_attn_func import self_attn_func


class FastSelfAttnFunc:
    """Has the face of an autograd.Function; see SelfAttnFunc."""

    @staticmethod
    def apply(
        use_time_mask: bool,
        is_training: bool,
        heads: int,
        inputs: torch.Tensor,
        input_weights: torch.Tensor,
        output_weights: torch.Tensor,
        input_biases: torch.Tensor | None,
        output_biases: torch.Tensor | None,
        pad_mask: torch.Tensor | None,
        mask_additive: bool,
        dropout_prob: float,
    ) -> torch.Tensor:
        """As self_attn_func, with scores scaled by d^-1/2."""
        return self_attn_func(
            use_time_mask, is_training, heads, None, inputs, input_weights, output_weights, input_biases,
            output_biases, pad_mask, mask_additive, dropout_prob,
        )  # fmt: skip

    @staticmethod
    def forward(ctx, *arguments: Any) -> torch.Tensor:
        """As `apply`."""
        return FastSelfAttnFunc.apply(*arguments)


fast_self_attn_func = FastSelfAttnFunc.apply
