"""The process groups of DistributedFusedLAMB, by public apex's options for them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from apex.contrib.optimizers._ranks import Ranks
from apex.parallel._waiting import CALLS, waiting
from apex.parallel.process_groups import timeout_of


def lamb_ranks(group_size, reducing, across, gathering, full, verbose):
    """Ranks in groups of `group_size` that follow each other: each shards the state, all hold the same.

    group_size: 0: the GPUs of this host, if that divides the ranks, else all ranks. reducing, across, gathering: how
    many process groups take turns to reduce within a group, over groups (full: over all ranks), and to gather (0:
    those that reduce). Every rank must call it alike.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks()  # which says so
    count = dist.get_world_size()
    size = group_size or _gpus(count)
    if count % size:
        raise RuntimeError(
            f"DistributedFusedLAMB: dwu_group_size={size} does not divide the {count} ranks: pass one that does, or 0"
        )
    groups = [list(range(first, first + size)) for first in range(0, count, size)]
    others = [list(range(place, count, size)) for place in range(size)]
    one = len(groups) == 1
    shards = _turns(groups, 1, one)
    made = dict(reducing=_turns(groups, reducing, one) if reducing > 1 and not full else shards)
    made["gathering"] = _turns(groups, gathering, one) if gathering else made["reducing"]
    copies = None if one else _turns(others, 1, False)
    if full:
        made["across"] = _turns([list(range(count))], across, True)
    elif not one:
        made["across"] = _turns(others, across, False) if across > 1 else copies
    if verbose:
        print(f"rank {dist.get_rank()}: shards over {groups}, copies over {others}, {made}")
    return Ranks(
        distributed=None if one else shards[0], redundant=None if one else copies[0], full=full, **made
    )


def _gpus(count):
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return here if 0 < here <= count and count % here == 0 else count


def _turns(groups, count, everyone):
    """`count` process groups for each list of ranks, of which this rank's are returned; one of all ranks is there."""
    if everyone and count == 1:
        return [dist.group.WORLD]
    timeout = timeout_of(dist.group.WORLD)
    with waiting("the process groups of this optimizer", CALLS, "DistributedFusedLAMB"):
        made = [(ranks, dist.new_group(ranks, timeout=timeout)) for ranks in groups for _ in range(count)]
    return [group for ranks, group in made if dist.get_rank() in ranks]
