"""Automatic sparsity (ASP): weights are pruned to 2:4 patterns, and stay so while the model is trained."""

from apex.contrib.sparsity.asp import ASP
from apex.contrib.sparsity.sparse_masklib import create_mask

__all__ = ["ASP", "create_mask"]
