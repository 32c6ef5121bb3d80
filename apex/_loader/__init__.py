"""Finds out what runs here, and loads it: bindings, host library, kernel packs, run-time compilers.

`load()` is what the rest of apex calls before it touches `torch.ops.apex`. Nothing happens at import.
"""


def load():
    """Brings `torch.ops.apex.*` to life and returns bindings.Loaded (native or not, the module `_C`, the
    reason)."""
    from apex._loader import bindings

    return bindings.load()
