"""The casts that layers use: the one place where they meet the ops behind them."""

from __future__ import annotations

from apex.transformer_engine.pytorch._plain_casts import (
    current_scale,
    delayed_scale,
    dequantize,
    dequantize_blocks,
    quantize,
    quantize_blocks,
    transpose,
    update_scales,
)
from apex.transformer_engine.pytorch._plain_casts import largest_magnitude as amax
from apex.transformer_engine.pytorch._plain_casts import record_amax as record

__all__ = [
    "amax",
    "current_scale",
    "delayed_scale",
    "dequantize",
    "dequantize_blocks",
    "quantize",
    "quantize_blocks",
    "record",
    "transpose",
    "update_scales",
]
