"""Casts switched off for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from apex.amp._amp_state import _amp_state


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Inside, patched functions are torch's own. Does nothing where nothing is patched.

    torch.compile runs what is around it in eager mode, and raises where a full graph is wanted.
    """
    handle = getattr(_amp_state, "handle", None)
    if handle is None:
        yield
        return
    if handle.is_active() and torch.compiler.is_dynamo_compiling():
        # The graph holds calls of patched functions, which ask the handle when what compiles it runs them.
        torch._dynamo.graph_break(msg="amp.disable_casts() has no effect inside a graph; enter it outside")
    with handle._disable_casts():
        yield
