"""Layers of transformers for JAX and Flax, with FP8, on apex's kernels: transformer_engine.jax's names.

Needs jax, and flax for `apex.transformer_engine.jax.flax`; torch is not needed and not imported.
"""

from __future__ import annotations

import importlib
from typing import Any

from apex.transformer_engine.common.recipe import DelayedScaling, Format
from apex.transformer_engine.jax.cross_entropy import cross_entropy
from apex.transformer_engine.jax.fp8 import (
    FP8_META,
    fp8_autocast,
    get_delayed_scaling,
    is_fp8_available,
    is_fp8_enabled,
    update_collections,
    update_fp8_metas,
)
from apex.transformer_engine.jax.norms import layer_norm, rms_norm
from apex.transformer_engine.jax.sharding import (
    MajorShardingType,
    MeshResource,
    ShardingResource,
    ShardingType,
    global_shard_guard,
)
from apex.transformer_engine.jax.softmax import softmax

__all__ = [
    "FP8_META",
    "DelayedScaling",
    "Format",
    "MajorShardingType",
    "MeshResource",
    "ShardingResource",
    "ShardingType",
    "cross_entropy",
    "flax",
    "fp8_autocast",
    "get_delayed_scaling",
    "global_shard_guard",
    "is_fp8_available",
    "is_fp8_enabled",
    "layer_norm",
    "rms_norm",
    "softmax",
    "update_collections",
    "update_fp8_metas",
]


def __getattr__(name: str) -> Any:
    if name == "flax":
        return importlib.import_module("apex.transformer_engine.jax.flax")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
