"""The mean over ranks of one bucket of gradients: gather, all-reduce, scatter."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

from apex._legacy import amp_C
from apex._plain import is_plain
from apex.parallel import _status
from apex.parallel._flat import flatten, unflatten
from apex.parallel._waiting import waiting

HALVES = (torch.float16, torch.bfloat16)
MEAN = "a mean of gradients"
_DENSE, _OVERLAPS = 0, 1  # of torch's debug_has_internal_overlap; 2: it does not know
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
    None, which optimizers tell from zeros. Behind those goes the rank's status.

    `finish` may be called on another stream; the object, which keeps alive what that one reads, must then live
    until the stream it was made on waits for it, or be let go by `release`.

    Args:
        params: parameters of one dtype and device. No rank may name others.
        averaging: Averaging.
        group: process group, or None.
        name_of: parameter -> its name, for errors.
        status: of this rank; with any but FINE it sends zeros.
    """

    @torch.no_grad()
    def __init__(self, params, averaging, group=None, name_of=lambda p: tuple(p.shape), status=_status.FINE):
        self.finished = False
        self._params = params
        self._averaging, self._group = averaging, group
        self._grads = [p.grad if status is _status.FINE else None for p in params]
        for p, grad in zip(params, self._grads, strict=True):
            if grad is not None and grad.layout != torch.strided:
                raise TypeError(
                    f"the gradient of {name_of(p)} is sparse and cannot be reduced with others: "
                    "leave out sparse=True, or keep the module outside and reduce it by itself"
                )
        given = [torch.zeros_like(p) if g is None else g for p, g in zip(params, self._grads, strict=True)]
        first = given[0]
        self._numel = sum(g.numel() for g in given)
        self._flat = flatten([*given, _tail(self._grads, first, status)])
        if averaging.always_float32 and first.dtype in HALVES:
            self._flat = self._flat.float()
        if averaging.predivide != 1.0:
            self._flat.mul_(1.0 / averaging.predivide)
        self._home = None if first.device.type == "cpu" else _current(first.device)
        with waiting(MEAN, group=group):
            self._work = dist.all_reduce(self._flat, group=group, async_op=True)

    def wait(self):
        """On the CPU the host waits for the all-reduce, on an accelerator the current stream does."""
        if self._work is not None:
            with waiting(MEAN, group=self._group) as wait:
                wait.until(self._work)
            self._work = None

    @property
    def status(self):
        """Three numbers: the sums of all ranks' statuses, on the device; to be read after `wait`."""
        return self._flat[-_status.LENGTH :]

    def check(self, who, late=None):
        """Raises where the ranks' statuses do not go together. late: an accelerator's are put there, and not read."""
        self.wait()
        if late is None or self._flat.device.type == "cpu":
            _status.check(*self.status.ne(0).tolist(), who)
        else:
            late.put(self.status)

    @torch.no_grad()
    def finish(self, retain=False):
        """Waits (on an accelerator: lets the current stream wait) and gives the parameters their gradients.

        retain: gradients become views of the reduced buffer, which is returned; otherwise they are written
        where they were, and None is returned.
        """
        self.wait()
        self.finished = True
        wanted = self._used_elsewhere()
        if retain:
            return self._hand_out_views(wanted)
        flat, factor = self._flat[: self._numel], self._averaging.factor
        sources, targets = [], []
        for i, view in enumerate(unflatten(flat, self._params)):
            if wanted[i] and not _is_written_raw(self._grads[i]):
                if self._grads[i] is None or _has_no_place(self._grads[i]):
                    self._grads[i] = self._params[i].grad = torch.empty_like(self._params[i])
                else:
                    self._grads[i].copy_(view * factor)
                    continue
            if self._grads[i] is not None and view.numel():
                sources.append(view)
                targets.append(self._grads[i])
        _scale(sources, targets, factor)
        return None

    def release(self, device):
        """The current stream waits for all that was done here: the memory may be used again when it has."""
        if self._home is not None:
            here = _current(device)
            if here != self._home:
                self._flat.record_stream(here)

    def _used_elsewhere(self):
        """For each parameter, whether a rank has a gradient. Asks the device only where this one lacks one."""
        if all(grad is not None for grad in self._grads):
            return [True] * len(self._grads)
        return self._flat[self._numel : -_status.LENGTH].ne(0).tolist()

    def _hand_out_views(self, wanted):
        flat = self._flat[: self._numel]
        flat.mul_(self._averaging.factor)
        flat = flat.to(self._params[0].dtype)
        for p, view, used in zip(self._params, unflatten(flat, self._params), wanted, strict=True):
            if used:
                p.grad = view.view_as(p)
        return flat


def _current(device):
    return torch.get_device_module(device).current_stream(device)


def _tail(grads, like, status):
    """One element for each gradient, 1 where there is one, else 0; and the status."""
    if status is _status.FINE and all(grad is not None for grad in grads):
        tail = like.new_ones(len(grads) + _status.LENGTH)  # made on the device: nothing waits
        tail[-_status.LENGTH : -1].zero_()
        return tail
    return like.new_tensor([*(float(grad is not None) for grad in grads), *status])


def _is_written_raw(grad):
    """Whether a kernel may write a gradient: its bytes are its values, are nobody else's, and leave no gaps."""
    return (
        grad is not None
        and torch._debug_has_internal_overlap(grad) == _DENSE
        and is_plain(grad)
        and not torch._C._is_cow_tensor(grad)
    )


def _has_no_place(grad):
    """Whether no value of its own can be written to each element: expanded tensors, and zeros without memory."""
    return grad._is_zerotensor() or torch._debug_has_internal_overlap(grad) == _OVERLAPS


def _scale(sources, targets, factor):
    """targets[i] = factor * sources[i]."""
    if not sources:
        return
    if targets[0].dtype in _SCALED_AS_COPIED:
        amp_C.multi_tensor_scale(0, None, [sources, targets], factor)
    else:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source * factor)
