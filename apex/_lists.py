"""Calling ops over lists of tensors from Python, once: optimizers keep plans instead (apex/optimizers/_plan.py)."""

import torch

from apex._loader import bindings


def module():
    """The compiled entries, cheaper than the dispatcher's; None without bindings, and where torch traces."""
    return None if torch.compiler.is_compiling() else bindings.load().module


def call(op, lists, *scalars, **keywords):
    """One call of an op such as "multi_tensor_scale"; scalars and keywords are its schema's, after the lists."""
    compiled = module()
    if compiled is None:
        getattr(torch.ops.apex, op)(*lists, *scalars, **keywords)
    else:
        bindings.entry(compiled, op)(lists, *scalars, **keywords)
