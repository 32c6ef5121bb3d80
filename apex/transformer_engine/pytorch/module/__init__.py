"""The layers."""

from apex.transformer_engine.pytorch.module.fp8_padding import Fp8Padding, Fp8Unpadding
from apex.transformer_engine.pytorch.module.grouped_linear import GroupedLinear
from apex.transformer_engine.pytorch.module.layernorm import LayerNorm
from apex.transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear
from apex.transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP
from apex.transformer_engine.pytorch.module.linear import Linear
from apex.transformer_engine.pytorch.module.rmsnorm import RMSNorm

__all__ = [
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
]
