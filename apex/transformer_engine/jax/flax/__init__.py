"""Layers for Flax, with transformer_engine.jax.flax's names and fields."""

from __future__ import annotations

from apex.transformer_engine.jax.flax.attention import (
    DotProductAttention,
    MultiHeadAttention,
    RelativePositionBiases,
)
from apex.transformer_engine.jax.flax.module import (
    DenseGeneral,
    LayerNorm,
    LayerNormDenseGeneral,
    LayerNormMLP,
    Softmax,
    SoftmaxType,
    TransformerEngineBase,
)
from apex.transformer_engine.jax.flax.transformer import (
    TransformerLayer,
    TransformerLayerType,
    extend_logical_axis_rules,
)

__all__ = [
    "DenseGeneral",
    "DotProductAttention",
    "LayerNorm",
    "LayerNormDenseGeneral",
    "LayerNormMLP",
    "MultiHeadAttention",
    "RelativePositionBiases",
    "Softmax",
    "SoftmaxType",
    "TransformerEngineBase",
    "TransformerLayer",
    "TransformerLayerType",
    "extend_logical_axis_rules",
]
