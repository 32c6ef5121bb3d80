"""Gradients of a backward pass, one by one in Python: what goes where, and what is unscaled together."""

from __future__ import annotations

import torch

from apex._loader import bindings
from apex._plain import writable_gradient
from apex._sharding import local
from apex.amp._convert import HALVES
from apex.amp._errors import AmpTypeError
from apex.amp.scaler import _op

FULL = (torch.float32, torch.float64)


def holds_no_gradient(param):
    """Whether it never will: integers and booleans. Raises AmpTypeError for gradients that amp cannot unscale."""
    if not (param.is_floating_point() or param.is_complex()):
        return True
    if param.dtype not in (*HALVES, *FULL):
        raise AmpTypeError(
            "a parameter of an optimizer is neither half nor full precision",
            wanted="float16, bfloat16, float32 or float64",
            found=str(param.dtype),
            remedy="leave it out: SGD((p for p in model.parameters() if p.dtype == torch.float32), lr)",
        )
    return False


def set_aside(params, stash):
    """Gradients that were there before go to the stash; autograd then has nothing to add to."""
    for i, param in enumerate(params):
        stash[i] = param.grad
        param.grad = None


def dense_gradient(owner):
    """owner.grad; where somebody put one of another layout there, which may overlap itself, a copy in the owner's."""
    grad = writable_gradient(owner)
    if grad is not None and grad.layout == torch.strided and grad.stride() != owner.stride():
        grad = owner.grad = laid_out_as(torch.empty_like(owner), grad)
    return grad


def laid_out_as(like, tensor):
    if tensor.stride() == like.stride() or (tensor.is_contiguous() and like.is_contiguous()):
        return tensor
    return torch.empty_like(like).copy_(tensor)


def copy(sources, targets):
    """targets[i] = sources[i], rounded: one launch for each device and pair of dtypes."""
    by_device = {}
    for source, target in zip(map(local, sources), map(local, targets), strict=True):
        columns = by_device.get(target.device)
        if columns is None:
            columns = by_device[target.device] = ([], [])
        columns[0].append(source)
        columns[1].append(target)
    bindings.load()
    for columns in by_device.values():
        _op("multi_tensor_scale", None, list(columns), 1.0, None)


@torch.no_grad()
def rescale(grads, ratio):
    """Multiplies gradients in place; ratio: a float, or a tensor without dimensions on whichever device."""
    by_device = {}
    for grad in map(local, grads):
        by_device.setdefault(grad.device, []).append(grad)
    for device, found in by_device.items():
        dense = [grad for grad in found if grad.layout == torch.strided]
        factor = ratio.to(device) if isinstance(ratio, torch.Tensor) else ratio
        if dense:
            torch._foreach_mul_(dense, factor)
        for grad in found:
            if grad.layout != torch.strided:
                grad.mul_(factor)


class Gradients:
    """Gradients of a backward pass, sorted; the stash is emptied when all is done.

    Attributes:
        fresh: those to unscale in place.
        sums, stashed: those that go on top of a stashed one.
    """

    def __init__(self, scaler, params=(), stashed_grads=()):
        self._take = scaler._take
        self.fresh, self.sums, self.stashed = [], [], []
        self._sparse = []  # (parameter, its gradient before): unscaled in place, then added
        self._stashes = []
        if params:
            self.add(params, stashed_grads)

    def add(self, params, stashed_grads):
        self._stashes.append(stashed_grads)
        for param, before in zip(params, stashed_grads, strict=True):
            grad = dense_gradient(param)
            if grad is None:
                param.grad = before
            elif not self._take(grad):
                continue
            elif before is None:
                self.fresh.append(grad)
            elif grad.layout != torch.strided or before.layout != torch.strided:
                self.fresh.append(grad)
                self._sparse.append((param, before))
            else:
                self.sums.append(grad)
                self.stashed.append(laid_out_as(grad, before))

    def unscale(self, scaler, scale_override=None):
        """Unscales in place and adds what was set aside; scale_override: as unscale_with_stashed has it."""
        if self.fresh:
            override = None if scale_override is None else scale_override[0] / scale_override[2]
            scaler.unscale(self.fresh, self.fresh, None, models_are_masters=True, scale_override=override)
        if self.sums:
            scaler.unscale_with_stashed(self.sums, self.stashed, self.sums, scale_override)
        self.finish()

    def finish(self):
        for param, before in self._sparse:
            param.grad = param.grad + before
        for stashed_grads in self._stashes:
            stashed_grads[:] = [None] * len(stashed_grads)
