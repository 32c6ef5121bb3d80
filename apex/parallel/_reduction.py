"""The mean over ranks of one bucket of gradients: gather, all-reduce, scatter."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

from apex._legacy import amp_C
from apex.parallel._flat import flatten, unflatten

HALVES = (torch.float16, torch.bfloat16)
_SCALED_AS_COPIED = (*HALVES, torch.float32, torch.float64)  # what multi_tensor_scale takes


@dataclasses.dataclass(frozen=True)
class Averaging:
    """How a sum over ranks becomes a mean.

    average: divide by the number of ranks at all. predivide: by which part of it before the sum, so that
    float16 sums stay in range. always_float32: sum half-precision gradients in float32.
    """

    average: bool = True
    predivide: float = 1.0
    always_float32: bool = False

    @property
    def factor(self):
        """What the sum is multiplied by."""
        return self.predivide / dist.get_world_size() if self.average else 1.0


class Reduction:
    """The gradients of some parameters on their way through one all-reduce.

    Making it copies the gradients behind each other and starts the all-reduce; `finish` waits for it and
    writes the results. A rank that has no gradient for a parameter sends zeros. Behind the gradients goes one
    element for each parameter, not 0 if it has a gradient on any rank: a parameter that nobody used keeps
    None, which optimizers tell from zeros.

    `finish` may be called on another stream; the object, which keeps alive what that one reads, must then live
    until the stream it was made on waits for it.

    Args:
        params: parameters of one dtype and device. No rank may name others.
        averaging: Averaging.
        group: process group, or None.
        name_of: parameter -> its name, for errors.
    """

    @torch.no_grad()
    def __init__(self, params, averaging, group=None, name_of=lambda p: tuple(p.shape)):
        self.finished = False
        self._params = params
        self._averaging = averaging
        self._grads = [p.grad for p in params]
        for p, grad in zip(params, self._grads, strict=True):
            if grad is not None and grad.layout != torch.strided:
                raise TypeError(
                    f"the gradient of {name_of(p)} is sparse and cannot be reduced with others: "
                    "leave out sparse=True, or keep the module outside and reduce it by itself"
                )
        given = [torch.zeros_like(p) if g is None else g for p, g in zip(params, self._grads, strict=True)]
        first = given[0]
        self._numel = sum(g.numel() for g in given)
        self._flat = flatten([*given, _present(self._grads, first)])
        if averaging.always_float32 and first.dtype in HALVES:
            self._flat = self._flat.float()
        if averaging.predivide != 1.0:
            self._flat.mul_(1.0 / averaging.predivide)
        self._work = dist.all_reduce(self._flat, group=group, async_op=True)

    @torch.no_grad()
    def finish(self, retain=False):
        """Waits (on an accelerator: lets the current stream wait) and gives the parameters their gradients.

        retain: gradients become views of the reduced buffer, which is returned; otherwise they are written
        where they were, and None is returned.
        """
        self._work.wait()
        self.finished = True
        wanted = self._used_elsewhere()
        if retain:
            return self._hand_out_views(wanted)
        flat, factor = self._flat[: self._numel], self._averaging.factor
        sources, targets = [], []
        for i, view in enumerate(unflatten(flat, self._params)):
            if self._grads[i] is None and wanted[i]:
                self._grads[i] = self._params[i].grad = torch.empty_like(self._params[i])
            if self._grads[i] is not None and view.numel():
                sources.append(view)
                targets.append(self._grads[i])
        _scale(sources, targets, factor)
        return None

    def _used_elsewhere(self):
        """For each parameter, whether a rank has a gradient. Asks the device only where this one lacks one."""
        if all(grad is not None for grad in self._grads):
            return [True] * len(self._grads)
        return self._flat[self._numel :].ne(0).tolist()

    def _hand_out_views(self, wanted):
        flat = self._flat[: self._numel]
        flat.mul_(self._averaging.factor)
        flat = flat.to(self._params[0].dtype)
        for p, view, used in zip(self._params, unflatten(flat, self._params), wanted, strict=True):
            if used:
                p.grad = view.view_as(p)
        return flat


def _present(grads, like):
    """One element for each gradient: 1 where there is one, else 0."""
    if all(grad is not None for grad in grads):
        return like.new_ones(len(grads))  # made on the device: nothing waits
    return like.new_tensor([float(grad is not None) for grad in grads])


def _scale(sources, targets, factor):
    """targets[i] = factor * sources[i]."""
    if not sources:
        return
    if targets[0].dtype in _SCALED_AS_COPIED:
        amp_C.multi_tensor_scale(0, None, [sources, targets], factor)
    else:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source * factor)
