"""TorchScript sees torch's own functions behind amp's wrappers, which it cannot compile: it runs them without casts.

torch compiles scripts of its own too: those of forward-mode derivatives, when the first is asked for.
"""

from __future__ import annotations

import inspect
import weakref

from torch.jit import _builtins


def remember(original, wrapper):
    """That `wrapper` stands in the place of `original`."""
    if not inspect.isfunction(wrapper):
        return
    operator = _builtins._find_builtin(original)
    if operator is None:
        wrapper.__prepare_scriptable__ = lambda: original
        return
    table, key = _builtins._get_builtin_table(), id(wrapper)
    table[key] = operator
    weakref.finalize(wrapper, table.pop, key, None)
