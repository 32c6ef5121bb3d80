"""The public engine's switches of the environment; docs/transformer_engine.md lists them all.

Those of ranges and of reductions are read once, when the package is imported.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

_RANGES = os.environ.get("NVTE_NVTX_ENABLED", "0") == "1"


def is_unfused() -> bool:
    """Whether attention is made by products and a softmax: no kernel of torch is wanted, or bits must repeat."""
    off = [os.environ.get(name, "1") == "0" for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN")]
    return all(off) or os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") == "0"


def warn_of_refused(environment: Mapping[str, str]) -> None:
    """Warns of what is asked for and would give other numbers than are made here."""
    interval = environment.get("NVTE_DP_AMAX_REDUCE_INTERVAL", "1")
    if interval != "1":
        warnings.warn(
            f"NVTE_DP_AMAX_REDUCE_INTERVAL={interval} has no effect: magnitudes are reduced over all ranks of "
            "fp8_group in every step; set reduce_amax=False in the recipe to reduce none",
            stacklevel=2,
        )


def ranged(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a function: with NVTE_NVTX_ENABLED=1, profilers of a GPU show it as a range (NVTX, on ROCm roctx)."""

    def decorate(function):
        if not _RANGES:
            return function

        @functools.wraps(function)
        def run(*arguments, **keywords):
            if torch.compiler.is_compiling() or not torch.cuda.is_available():
                return function(*arguments, **keywords)
            torch.cuda.nvtx.range_push(name)
            try:
                return function(*arguments, **keywords)
            finally:
                torch.cuda.nvtx.range_pop()

        return run

    return decorate
