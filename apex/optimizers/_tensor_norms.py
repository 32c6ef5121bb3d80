"""Norms of single tensors of which each rank holds a part."""

from __future__ import annotations

import torch

from apex import _loader
from apex._sharding import combine_norm, shard_groups


def sharded_norms(params, parts, maximum=False, scale=1.0, inv_scale=None):
    """float32, one element a parameter: the L2 norm of each tensor (or its largest magnitude) over all ranks.

    params: parameters, DTensors among them. parts: for each the local part of its gradient, or of itself; on
    one device. Every rank must call it with the same parameters. scale, inv_scale: see multi_tensor_l2norm.
    """
    _loader.load()
    device = parts[0].device
    norms, total = (torch.zeros(n, dtype=torch.float32, device=device) for n in (len(parts), 1))
    torch.ops.apex.multi_tensor_l2norm(
        [part.contiguous() for part in parts], total, norms, None, scale, inv_scale, False, maximum
    )
    by_groups = {}
    for i, p in enumerate(params):
        by_groups.setdefault(shard_groups(p), []).append(i)
    for groups, indices in by_groups.items():
        if groups:
            norms[indices] = combine_norm(norms[indices], groups, maximum)
    return norms
