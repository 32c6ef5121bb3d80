"""Fused functions of transformers."""

from apex.transformer.functional.fused_bias_activation import (
    fused_bias_geglu,
    fused_bias_gelu,
    fused_bias_quick_geglu,
    fused_bias_quick_gelu,
    fused_bias_squared_relu,
    fused_bias_swiglu,
)
from apex.transformer.functional.fused_rope import (
    fused_apply_rotary_pos_emb,
    fused_apply_rotary_pos_emb_2d,
    fused_apply_rotary_pos_emb_cached,
    fused_apply_rotary_pos_emb_thd,
)
from apex.transformer.functional.fused_softmax import FusedScaleMaskSoftmax

__all__ = [
    "FusedScaleMaskSoftmax",
    "fused_apply_rotary_pos_emb",
    "fused_apply_rotary_pos_emb_2d",
    "fused_apply_rotary_pos_emb_cached",
    "fused_apply_rotary_pos_emb_thd",
    "fused_bias_geglu",
    "fused_bias_gelu",
    "fused_bias_quick_geglu",
    "fused_bias_quick_gelu",
    "fused_bias_squared_relu",
    "fused_bias_swiglu",
]
