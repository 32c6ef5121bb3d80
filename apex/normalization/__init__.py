"""Layer norm and RMS norm as fused kernels: modules, and the functions under them."""

from apex.normalization.fused_add_norm import fused_add_layer_norm, fused_add_rms_norm
from apex.normalization.fused_layer_norm import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
)

__all__ = [
    "FusedLayerNorm",
    "FusedRMSNorm",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_add_layer_norm",
    "fused_add_rms_norm",
]
