"""Leaves of a graph of their own: where a gradient's gradient is found by torch's differentiable ops."""

import torch


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
