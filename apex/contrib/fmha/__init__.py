"""Self attention over sequences of different lengths that lie behind each other."""

from apex.contrib.fmha.fmha import FMHAFun

__all__ = ["FMHAFun"]
