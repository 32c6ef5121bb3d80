"""The functions of public apex's fast_layer_norm, for any hidden size. They record no gradients, as there."""

from __future__ import annotations

import torch

from apex._legacy._raw import raw as _raw
from apex._loader import bindings

bindings.load()
__all__ = ["ln_bwd", "ln_fwd"]


@_raw
def ln_fwd(x, gamma, beta, epsilon):
    """[output, mean, 1 / standard deviation] of rows of gamma.numel() elements; the output has gamma's dtype."""
    return list(torch.ops.apex.layer_norm_forward(x, gamma.shape, gamma, beta, epsilon, dtype=gamma.dtype))


@_raw
def ln_bwd(dz, x_or_z, mu, rsigma, gamma, beta=None, memory_efficient=False):
    """[dx, dgamma, dbeta, and their partial sums over rows, float32: of one part each].

    x_or_z: the forward's input or, if memory_efficient, its output, which needs `beta`. dx has its dtype.
    """
    some = gamma if beta is None else beta  # dbeta has gamma's shape and dtype
    if memory_efficient and beta is None:
        raise ValueError("ln_bwd: memory_efficient needs beta")
    dx, dgamma, dbeta = torch.ops.apex.layer_norm_backward(
        dz, x_or_z, mu, rsigma, gamma.shape, gamma, some, 0.0, memory_efficient
    )
    return [dx, dgamma, dbeta, dgamma.float().unsqueeze(0), dbeta.float().unsqueeze(0)]
