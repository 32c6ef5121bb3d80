"""Which tensors of a model cannot be reordered, whatever they are to it, and why."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

_PLAIN = (torch.Tensor, nn.Parameter, getattr(nn, "Buffer", nn.Parameter))


def why_fixed(tensor: torch.Tensor) -> str | None:
    """Why elements of the tensor cannot be exchanged in place; None where they can."""
    if type(tensor) not in _PLAIN:
        return f"is a {type(tensor).__name__}, whose elements may lie elsewhere"
    if tensor.layout != torch.strided:
        return f"has the layout {tensor.layout}"
    if tensor.is_inference():
        return "was made in torch.inference_mode(), and cannot be changed outside of it"
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return "is expanded: several of its elements are one"
    return None


def _extent(tensor):
    """(storage, first byte, end) of a tensor."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.storage_offset() * tensor.element_size()
    return tensor.untyped_storage()._cdata, begin, begin + (last + 1) * tensor.element_size()


def fixed_among(tensors: Iterable[torch.Tensor]) -> dict[int, str]:
    """{id: why} of those that cannot be written, that have hooks, or that share memory with another of them."""
    found, extents = {}, []
    for tensor in {id(t): t for t in tensors}.values():
        why = why_fixed(tensor)
        if why is None and tensor._backward_hooks:
            why = "has hooks on its gradient"
        if why is not None:
            found[id(tensor)] = why
        if tensor.layout == torch.strided and tensor.numel() and type(tensor) in _PLAIN:
            extents.append((*_extent(tensor), id(tensor)))
    end, owner, storage = 0, 0, None
    for where, begin, until, key in sorted(extents):
        if where == storage and begin < end:
            found[key] = found[owner] = "shares memory with another tensor"
        if where != storage or until > end:
            end, owner, storage = until, key, where
    return found
