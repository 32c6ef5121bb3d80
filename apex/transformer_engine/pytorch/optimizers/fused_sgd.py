"""te.optimizers.FusedSGD: apex.optimizers'."""

from apex.optimizers import FusedSGD

__all__ = ["FusedSGD"]
