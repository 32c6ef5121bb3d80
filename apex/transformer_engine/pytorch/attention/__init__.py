"""Attention: its core, the layer around it, rotary embedding, and the cache of generation."""

from apex.transformer_engine.pytorch.attention.dot_product_attention import DotProductAttention
from apex.transformer_engine.pytorch.attention.inference import InferenceParams
from apex.transformer_engine.pytorch.attention.multi_head_attention import MultiheadAttention
from apex.transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb

__all__ = [
    "DotProductAttention",
    "InferenceParams",
    "MultiheadAttention",
    "RotaryPositionEmbedding",
    "apply_rotary_pos_emb",
]
