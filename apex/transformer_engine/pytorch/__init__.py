"""Transformer Engine's layers and contexts for PyTorch: see docs/transformer_engine.md."""

import os
import sys
from typing import Any

from apex._legacy import absent
from apex.transformer.tensor_parallel.random import CudaRNGStatesTracker
from apex.transformer_engine.pytorch import constants, cpp_extensions, distributed, fp8, ops, optimizers
from apex.transformer_engine.pytorch._formats import is_fp8_available, served
from apex.transformer_engine.pytorch._recompute import checkpoint
from apex.transformer_engine.pytorch._refusals import why_absent
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
from apex.transformer_engine.pytorch.fp8 import (
    get_default_recipe,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
)
from apex.transformer_engine.pytorch.graph import make_graphed_callables
from apex.transformer_engine.pytorch.module import (
    Fp8Padding,
    Fp8Unpadding,
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
    "Fp8Padding",
    "Fp8Unpadding",
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
    "get_default_recipe",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_in_onnx_export_mode",
    "is_mxfp8_available",
    "make_graphed_callables",
    "onnx_export",
    "ops",
    "optimizers",
    "quantized_model_init",
    "served",
]


def __getattr__(name: str) -> Any:
    text = f"module {__name__!r} has no attribute {name!r}{why_absent(name)}"
    raise absent.refused(text, __name__, sys._getframe(1))


warn_of_refused(os.environ)
