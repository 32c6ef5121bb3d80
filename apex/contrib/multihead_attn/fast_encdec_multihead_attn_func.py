"""encdec_attn_func with the arguments of public apex's fast form."""

from __future__ import annotations

from typing import Any

import torch

from apex.contrib.multihead_attn.encdec_multihead_attn_func import encdec_attn_func


class FastEncdecAttnFunc:
    """Has the face of an autograd.Function; see SelfAttnFunc."""

    @staticmethod
    def apply(
        use_time_mask: bool,
        is_training: bool,
        heads: int,
        inputs_q: torch.Tensor,
        inputs_kv: torch.Tensor,
        input_weights_q: torch.Tensor,
        input_weights_kv: torch.Tensor,
        output_weights: torch.Tensor,
        pad_mask: torch.Tensor | None,
        dropout_prob: float,
    ) -> torch.Tensor:
        """As encdec_attn_func, without biases and with scores scaled by d^-1/2."""
        return encdec_attn_func(
            use_time_mask, is_training, heads, None, inputs_q, inputs_kv, input_weights_q, input_weights_kv,
            output_weights, None, None, None, pad_mask, dropout_prob,
        )  # fmt: skip

    @staticmethod
    def forward(ctx, *arguments: Any) -> torch.Tensor:
        """As `apply`."""
        return FastEncdecAttnFunc.apply(*arguments)


fast_encdec_attn_func = FastEncdecAttnFunc.apply
