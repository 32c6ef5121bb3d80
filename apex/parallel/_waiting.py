"""Waiting for other ranks: a collective that failed because a rank is not there says what it was for."""

from __future__ import annotations

import re
from typing import Any

import torch.distributed as dist

from apex.parallel import _failures

# How torch's backends speak of a rank that ended or is late, where they raise plain RuntimeErrors.
_LOST = re.compile("gloo/|[Tt]imed out|[Tt]imeout|Connection |[Bb]roken pipe")
PASSES = (
    "a rank ended, or ran no such pass. Every rank runs as many forward and backward passes as the others; one without "
    "a batch takes part by DistributedDataParallel.empty_backward(), or with a batch of 0 rows"
)

CALLS = "a rank ended, or did not make this call, which every rank makes"


def waiting(what: str, why: str = PASSES, who: str = "", group: Any = None) -> waiting_for:
    """Says of a collective that failed, by its timeout or by another rank that did, what it was for.

    What waits is called by `run` or `until` of what the context gives, or on its own.

    Errors of another kind pass through as they are: no memory, shapes that do not fit, a group without a backend for
    these tensors.

    Args:
        what: whose other ranks' part was waited for.
        why: what may have happened, and what every rank has to do.
        who: the class that speaks.
        group: the process group that is waited in; None: that of all ranks. Ranks of it that fail end the waiting.
    """
    return waiting_for(f"for the other ranks' part of {what}", why, who, group)


class waiting_for(_failures.Wait):
    """The same of anything: `what` begins with "for"."""

    def __init__(self, what: str, why: str, who: str = "", group: Any = None) -> None:
        super().__init__(group)
        self._what, self._why, self._who = what, why, who

    def __enter__(self) -> _failures.Wait:
        self.begin()
        if self.ended:
            self.end()
            raise self._told()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.end()
        if isinstance(error, RuntimeError) and is_of_ranks(error):
            raise self._told() from error

    def _told(self):
        speaker, told = f"{self._who}: " if self._who else "", _failures.reason(self.group)
        vain = f"rank {dist.get_rank()} {_failures.VAIN} {self._what}"
        return RuntimeError(f"{speaker}{vain}: {told or self._why}")


def is_of_ranks(error: RuntimeError) -> bool:
    """Whether an error tells of ranks that are not there, rather than of this one."""
    text = str(error)
    return isinstance(error, dist.DistError) or (_failures.VAIN not in text and bool(_LOST.search(text)))
