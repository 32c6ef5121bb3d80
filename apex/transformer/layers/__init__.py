"""Layers whose parameters say whether sequence parallelism is in force (Megatron-LM reads it)."""

from apex.transformer.layers.layer_norm import FastLayerNorm, FusedLayerNorm, MixedFusedLayerNorm

__all__ = ["FastLayerNorm", "FusedLayerNorm", "MixedFusedLayerNorm"]
