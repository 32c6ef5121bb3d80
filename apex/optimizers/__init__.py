"""Fused optimizers with the interface of public apex."""

from apex.optimizers.fused_adam import FusedAdam

__all__ = ["FusedAdam"]
