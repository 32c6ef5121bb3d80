"""Gradients that are to be written in place."""

from __future__ import annotations

from typing import NamedTuple

import torch

from apex._loader import bindings
from apex._plain import is_shape_alone, range_of, writable_gradient
from apex._sharding import local


def separate_gradients(owners):
    """Gives each gradient memory of its own where it shares it with another one's.

    Autograd makes such gradients: what comes into `a.view(-1) + b.view(-1)` goes on to `a` and `b` as two views of one
    tensor. To scale both, or to add to both, changes each twice. The first keeps the memory, the others get copies.

    owners: tensors whose .grad are looked at; one may be there twice.
    """
    native = bindings.load().module
    if native is not None and native.separate_gradients(owners):
        return
    kept = None
    for place in sorted(filter(None, map(_Place.of, owners)), key=lambda place: place[:2]):
        if kept is None or place.storage != kept.storage or place.begin >= kept.end:
            kept = place
        elif place.owner is not kept.owner:
            with torch.no_grad():
                place.owner.grad = place.owner.grad.clone()


class _Place(NamedTuple):
    """Where a gradient lies in its storage, in bytes."""

    storage: int
    begin: int
    end: int
    owner: torch.Tensor

    @classmethod
    def of(cls, owner):
        """None without gradient, or where that has no memory."""
        grad = None if owner.grad is None else local(owner.grad)
        if grad is None or is_shape_alone(grad) or grad._is_zerotensor() or grad.numel() == 0:
            return None
        if grad.layout != torch.strided or not torch._C._has_storage(grad):
            return None
        return cls(grad.untyped_storage()._cdata, *range_of(grad), owner)


def writable_gradients(owners):
    """The gradients of these, those that there are, as ops on lists of tensors can write them: see writable_gradient
    and separate_gradients."""
    separate_gradients(owners)
    return [grad for grad in map(writable_gradient, owners) if grad is not None]
