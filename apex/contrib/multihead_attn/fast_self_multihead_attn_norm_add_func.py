"""Self-attention of normalized inputs, added to them, as public apex's function of that name."""

from __future__ import annotations

from typing import Any

import torch

from apex.contrib.multihead_attn import _core
from apex.contrib.multihead_attn.self_multihead_attn_func import self_attn_func
from apex.normalization.fused_layer_norm import fused_layer_norm_affine


class FastSelfAttnNormAddFunc:
    """Has the face of an autograd.Function; see SelfAttnFunc."""

    @staticmethod
    def apply(
        use_time_mask: bool,
        is_training: bool,
        heads: int,
        inputs: torch.Tensor,
        lyr_nrm_gamma_weights: torch.Tensor,
        lyr_nrm_beta_weights: torch.Tensor,
        input_weights: torch.Tensor,
        output_weights: torch.Tensor,
        pad_mask: torch.Tensor | None,
        dropout_prob: float,
    ) -> torch.Tensor:
        """inputs + dropout(attention(layer_norm(inputs))), [T, B, C]; the norm's weights are [C], its eps 1e-5.

        The others: as self_attn_func's.
        """
        width = (inputs.shape[-1],)
        normalized = fused_layer_norm_affine(inputs, lyr_nrm_gamma_weights, lyr_nrm_beta_weights, width, 1e-5)
        outputs = self_attn_func(
            use_time_mask, is_training, heads, None, normalized, input_weights, output_weights, None, None, pad_mask,
            False, dropout_prob,
        )  # fmt: skip
        return _core.dropout_add(outputs, inputs, dropout_prob, is_training)

    @staticmethod
    def forward(ctx, *arguments: Any) -> torch.Tensor:
        """As `apply`."""
        return FastSelfAttnNormAddFunc.apply(*arguments)


fast_self_attn_norm_add_func = FastSelfAttnNormAddFunc.apply
