"""The elements of a parameter in the order of memory, and copies between lists of such pieces."""

from __future__ import annotations

import torch


def is_dense(tensor):
    """Whether the elements lie in numel() places of memory one after the other, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return tensor.numel() == 0
            expected *= size
    return True


def flat(tensor):
    """The elements of a dense tensor in one dimension, as they lie in memory: a view."""
    tensor = tensor.detach()
    return tensor.as_strided((tensor.numel(),), (1,))


def flat_like(tensor, like):
    """The elements of `tensor` in the order in which those of `like` lie in memory; a view where that is one."""
    if tensor.stride() == like.stride():
        return flat(tensor)
    ordered = torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device)
    return flat(ordered.copy_(tensor.detach()))


def copy_lists(sources, targets):
    """targets[i] = sources[i], for lists of one-dimensional tensors.

    Between a floating-point and an integer type the leading bytes are copied and the others become 0: so
    parameters can travel as integers, with as many of their leading bytes as those have.
    """
    if all(s.is_floating_point() and t.is_floating_point() for s, t in zip(sources, targets, strict=True)):
        if targets:
            torch._foreach_copy_(targets, sources)
        return
    for source, target in zip(sources, targets, strict=True):
        _copy_leading_bytes(source, target)


def _copy_leading_bytes(source, target):
    source, target = (t.unsqueeze(-1).view(torch.uint8) for t in (source, target))  # (elements, bytes)
    count = min(source.size(-1), target.size(-1))
    target[:, : target.size(-1) - count] = 0
    target[:, target.size(-1) - count :] = source[:, source.size(-1) - count :]  # little-endian
