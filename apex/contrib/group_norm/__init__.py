"""Group norm for any layout, with SiLU fused or without."""

from apex.contrib.group_norm.group_norm import GroupNorm

__all__ = ["GroupNorm"]
