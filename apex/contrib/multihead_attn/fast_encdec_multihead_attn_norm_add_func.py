"""Attention of normalized queries to other keys, added to the queries, as public apex's function of that name."""

from __future__ import annotations

from typing import Any

import torch

from apex.contrib.multihead_attn import _core
from apex.contrib.multihead_attn.fast_encdec_multihead_attn_func import fast_encdec_attn_func
from apex.normalization.fused_layer_norm import fused_layer_norm_affine


class FastEncdecAttnNormAddFunc:
    """Has the face of an autograd.Function; see SelfAttnFunc."""

    @staticmethod
    def apply(
        use_time_mask: bool,
        is_training: bool,
        heads: int,
        inputs_q: torch.Tensor,
        inputs_kv: torch.Tensor,
        lyr_nrm_gamma_weights: torch.Tensor,
        lyr_nrm_beta_weights: torch.Tensor,
        input_weights_q: torch.Tensor,
        input_weights_kv: torch.Tensor,
        output_weights: torch.Tensor,
        pad_mask: torch.Tensor | None,
        dropout_prob: float,
    ) -> torch.Tensor:
        """inputs_q + dropout(attention(layer_norm(inputs_q), inputs_kv)); the norm's weights are [C], its eps 1e-5.

        The others: as encdec_attn_func's.
        """
        width = (inputs_q.shape[-1],)
        normalized = fused_layer_norm_affine(
            inputs_q, lyr_nrm_gamma_weights, lyr_nrm_beta_weights, width, 1e-5
        )
        outputs = fast_encdec_attn_func(
            use_time_mask, is_training, heads, normalized, inputs_kv, input_weights_q, input_weights_kv,
            output_weights, pad_mask, dropout_prob,
        )  # fmt: skip
        return _core.dropout_add(outputs, inputs_q, dropout_prob, is_training)

    @staticmethod
    def forward(ctx, *arguments: Any) -> torch.Tensor:
        """As `apply`."""
        return FastEncdecAttnNormAddFunc.apply(*arguments)


fast_encdec_attn_norm_add_func = FastEncdecAttnNormAddFunc.apply
