"""Finds out what runs here, and loads it: bindings, host library, kernel packs, run-time compilers.

`load()` is what the rest of apex calls before it touches `torch.ops.apex`. Nothing happens at import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from apex._loader.bindings import Loaded


def load() -> Loaded:
    """Brings `torch.ops.apex.*` to life and returns bindings.Loaded (native or not, the module `_C`, the
    reason)."""
    from apex._loader import bindings

    return bindings.load()
