"""Waiting for other ranks: a collective that failed because a rank is not there says what it was for."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch.distributed as dist

# How torch's backends speak of a rank that ended or is late, where they raise plain RuntimeErrors.
_LOST = re.compile("gloo/|[Tt]imed out|[Tt]imeout|Connection |[Bb]roken pipe")
PASSES = (
    "a rank ended, or ran no such pass. Every rank runs as many forward and backward passes as the others; one without "
    "a batch takes part by DistributedDataParallel.empty_backward(), or with a batch of 0 rows"
)

CALLS = "a rank ended, or did not make this call, which every rank makes"


@contextlib.contextmanager
def waiting(what: str, why: str = PASSES, who: str = "") -> Iterator[None]:
    """Says of a collective that failed, by its timeout or by the end of another process, what it was for.

    Errors of another kind pass through as they are: no memory, shapes that do not fit, a group without a backend for
    these tensors.

    Args:
        what: whose other ranks' part was waited for.
        why: what may have happened, and what every rank has to do.
        who: the class that speaks.
    """
    with waiting_for(f"for the other ranks' part of {what}", why, who):
        yield


@contextlib.contextmanager
def waiting_for(what: str, why: str, who: str = "") -> Iterator[None]:
    """The same of anything: `what` begins with "for"."""
    try:
        yield
    except RuntimeError as error:
        if not is_of_ranks(error):
            raise
        speaker = f"{who}: " if who else ""
        raise RuntimeError(f"{speaker}rank {dist.get_rank()} waited in vain {what}: {why}") from error


def is_of_ranks(error: RuntimeError) -> bool:
    """Whether an error tells of ranks that are not there, rather than of this one."""
    return isinstance(error, dist.DistError) or bool(_LOST.search(str(error)))
