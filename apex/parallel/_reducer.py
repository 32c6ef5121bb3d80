"""What all ranks do together, or none: a reduction of all gradients, a change of what is reduced; and Reducer."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from apex.parallel import _checks, _status
from apex.parallel._buckets import by_type
from apex.parallel._flat import extract_tensors, flat_dist_call
from apex.parallel._reduction import Averaging, Reduction


class Reducer:
    """Reduces when told to: `reduce()` replaces gradients by their mean over all ranks.

    Args:
        module_or_grads_list: a module, whose parameters are broadcast from rank 0 here; or tensors, in nested
            iterables, which are the caller's to keep in step.
    """

    def __init__(self, module_or_grads_list: nn.Module | Iterable[torch.Tensor]) -> None:
        _checks.check_initialized("Reducer")
        self.module = None
        self.grads: list[torch.Tensor] = []
        if isinstance(module_or_grads_list, torch.nn.Module):
            self.module = module_or_grads_list
            _checks.broadcast_parameters(self.module)
            self._agreed = trained(self.module)
        else:
            extract_tensors(module_or_grads_list, self.grads)

    def reduce(self) -> None:
        """The mean over ranks, of the module's gradients or of the tensors. Every rank must call it.

        A parameter that has a gradient on some ranks only counts as 0 on the others.

        Raises RuntimeError, on every rank, where only some ranks' parameters came to require gradients or no longer
        do; and where another rank's call raised.
        """
        if self.module is None:
            flat_dist_call(self.grads, dist.all_reduce)
            return
        params, name_of = trained(self.module), namer(self.module)
        if not same(params, self._agreed):
            self._change(params)
        reduce_all(by_type(params), Averaging(), "Reducer", name_of)

    def _change(self, params):
        old = by_type(self._agreed)
        if old:

            def send(number):
                return Reduction(old[number], Averaging(), status=_status.CHANGED)

            agree_on_change(old, params, "Reducer", send, self.module.parameters())
        self._agreed = params


def trained(module):
    return [p for p in module.parameters() if p.requires_grad]


def same(params, others):
    return len(params) == len(others) and all(map(operator.is_, params, others))


def namer(module):
    """parameter -> its name, looked up when it is asked for."""
    return lambda param: next((n for n, p in module.named_parameters() if p is param), "a parameter")


def reduce_all(buckets, averaging, who, name_of, retain=False):
    """Reduces lists of parameters, one message each; returns what Reduction.finish does."""
    reductions = []
    try:
        for bucket in buckets:
            reductions.append(Reduction(bucket, averaging, name_of=name_of))
    except BaseException:
        for bucket in buckets[len(reductions) :]:
            reductions.append(Reduction(bucket, averaging, status=_status.RAISED))
        for reduction in reductions:
            reduction.wait()
        raise
    for reduction in reductions:
        if reduction.status.device.type == "cpu":
            reduction.check(who)
    return [reduction.finish(retain) for reduction in reductions]


def agree_on_change(buckets, params, who, send, everything):
    """Raises RuntimeError on every rank unless the same parameters require gradients on each.

    Ranks that saw no change reduce `buckets`; the others send the first of these with their status, and learn
    whether all did. If not, they take part in the rest of that pass.

    buckets: those that ranks have in common. params: whose gradients are to be reduced from now on. send: sends
    bucket `number`, CHANGED, and returns the Reduction. everything: all parameters, in the same order on all ranks.
    """
    probe = send(0)
    probe.wait()
    raised, changed, unchanged = probe.status.ne(0).tolist()
    if raised or unchanged:
        for number in range(1, len(buckets)):
            send(number)
        _status.check(raised, changed, unchanged, who)
    trained = {id(p) for p in params}
    kinds = [(i, tuple(p.shape), p.dtype) for i, p in enumerate(everything) if id(p) in trained]
    what = f"{who}: the parameters that require gradients"
    _checks.check_same_on_all_ranks(kinds, buckets[0][0].device, what)
