"""Transformer Engine's layers and contexts for PyTorch: see docs/transformer_engine.md."""

import os

from apex.transformer.tensor_parallel.random import CudaRNGStatesTracker
from apex.transformer_engine.pytorch import constants, cpp_extensions, distributed, fp8, ops, optimizers
from apex.transformer_engine.pytorch._formats import is_fp8_available, served
from apex.transformer_engine.pytorch._recompute import checkpoint
from apex.transformer_engine.pytorch._state import (
    autocast,
    fp8_autocast,
    fp8_model_init,
    quantized_model_init,
)
from apex.transformer_engine.pytorch._switches import warn_of_refused
from apex.transformer_engine.pytorch.attention import (
    DotProductAttention,
    InferenceParams,
    MultiheadAttention,
    RotaryPositionEmbedding,
    apply_rotary_pos_emb,
)
from apex.transformer_engine.pytorch.constants import DType
from apex.transformer_engine.pytorch.export import is_in_onnx_export_mode, onnx_export
from apex.transformer_engine.pytorch.float8_tensor import Float8Tensor
from apex.transformer_engine.pytorch.graph import make_graphed_callables
from apex.transformer_engine.pytorch.module import (
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    RMSNorm,
)
from apex.transformer_engine.pytorch.transformer import TransformerLayer

__all__ = [
    "CudaRNGStatesTracker",
    "DType",
    "DotProductAttention",
    "Float8Tensor",
    "GroupedLinear",
    "InferenceParams",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "apply_rotary_pos_emb",
    "autocast",
    "checkpoint",
    "constants",
    "cpp_extensions",
    "distributed",
    "fp8",
    "fp8_autocast",
    "fp8_model_init",
    "is_fp8_available",
    "is_in_onnx_export_mode",
    "make_graphed_callables",
    "onnx_export",
    "ops",
    "optimizers",
    "quantized_model_init",
    "served",
]

warn_of_refused(os.environ)
