"""Leaves of a graph of their own: where a gradient's gradient is found by torch's differentiable ops."""

import torch


def given_if_compiled(gradient, of):
    """The gradient of the tensor `of`; for one that is not there, zeros under compiled autograd.

    That adds up what a node written in Python returns for each input that is asked for, and takes no None.
    """
    if gradient is None and of is not None and torch.compiler.is_compiling():
        return torch.zeros_like(of)
    return gradient


def leaf(tensor):
    """The tensor's values as a leaf that requires grad; None stays. torch.func's levels allow it, as for their own."""
    if tensor is None:
        return None
    allowed = torch._C._functorch.get_inplace_requires_grad_allowed()
    torch._C._functorch.set_inplace_requires_grad_allowed(True)
    try:
        return tensor.detach().requires_grad_()
    finally:
        torch._C._functorch.set_inplace_requires_grad_allowed(allowed)


def differentiate(function, tensors, gradients):
    """Gradients of `tensors`, of which some are None, from those of what `function` of them gives."""
    with torch.enable_grad():
        leaves = [leaf(t) for t in tensors]
        outputs = function(*leaves)
        pairs = [
            (o, g)
            for o, g in zip(outputs, gradients, strict=True)
            if g is not None and o.requires_grad and o.numel() == g.numel()
        ]
        present = [t for t in leaves if t is not None]
        found = [None] * len(present)
        if pairs:
            found = torch.autograd.grad(
                [o for o, _ in pairs], present, [g for _, g in pairs], allow_unused=True
            )
    found = iter(found)
    return [None if t is None else given_if_compiled(next(found), t) for t in leaves]
