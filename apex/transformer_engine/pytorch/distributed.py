"""The public engine's module of checkpoints and random states."""

from __future__ import annotations

from apex.transformer.tensor_parallel.random import CudaRNGStatesTracker
from apex.transformer_engine.pytorch._recompute import activation_recompute_forward, checkpoint
from apex.transformer_engine.pytorch._state import current

__all__ = [
    "CudaRNGStatesTracker",
    "activation_recompute_forward",
    "checkpoint",
    "in_fp8_activation_recompute_phase",
    "is_fp8_activation_recompute_enabled",
]


def is_fp8_activation_recompute_enabled() -> bool:
    """Whether te.checkpoint runs what is called here, for the first time or again, with FP8."""
    return current.frame is not None and bool(current.enabled)


def in_fp8_activation_recompute_phase() -> bool:
    """Whether it runs it again, in the backward pass."""
    return current.frame is not None and bool(current.frame.again)
