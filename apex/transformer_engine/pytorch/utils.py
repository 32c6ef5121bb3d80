"""Helpers that scripts take of the public engine's module of this name."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from apex.transformer.utils import divide, ensure_divisibility
from apex.transformer_engine.pytorch._parameters import default_init

__all__ = [
    "attention_mask_func",
    "divide",
    "ensure_divisibility",
    "get_default_init_method",
    "get_device_compute_capability",
    "init_method_constant",
    "init_method_normal",
    "is_bf16_compatible",
    "scaled_init_method_normal",
]

Init = Callable[[torch.Tensor], torch.Tensor]


def get_device_compute_capability() -> tuple[int, int]:
    """The current GPU's; (0, 0) where there is none."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def is_bf16_compatible() -> bool:
    """True: bfloat16 is taken on every device."""
    return True


def attention_mask_func(attention_scores: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Scores with -10000 written where the mask is true."""
    return attention_scores.masked_fill_(attention_mask, -10000.0)


def get_default_init_method() -> Init:
    """What layers draw their weights with: normal, with a standard deviation of 0.023."""
    return default_init


def init_method_constant(val: float) -> Init:
    """What fills a tensor with a number."""
    return lambda tensor: nn.init.constant_(tensor, val)


def init_method_normal(sigma: float) -> Init:
    """What draws a tensor from a normal distribution of a standard deviation."""
    return lambda tensor: nn.init.normal_(tensor, mean=0.0, std=sigma)


def scaled_init_method_normal(sigma: float, num_layers: int) -> Init:
    """init_method_normal of sigma / sqrt(2 num_layers)."""
    return init_method_normal(sigma / math.sqrt(2.0 * num_layers))
