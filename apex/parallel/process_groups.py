"""Groups of ranks that share the statistics of SyncBatchNorm."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from apex.parallel._waiting import CALLS, waiting


def is_gloo(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether gloo carries tensors of a device in a group (None: that of all ranks); others may carry other devices'.

    torch.distributed.get_backend says "undefined" of groups that were made without naming one.
    """
    group = dist.group.WORLD if group is None else group
    try:
        return "gloo" in group._get_backend(torch.device(device.type)).name()
    except (AttributeError, RuntimeError):
        return dist.get_backend(group) == "gloo"


def timeout_of(group: dist.ProcessGroup | None = None) -> datetime.timedelta | None:
    """How long ranks of a process group (None: all) wait for each other, which torch's new_group would not take over.

    None where the group does not tell: then torch's default serves.
    """
    group = dist.group.WORLD if group is None else group
    for device in filter(None, (torch.device("cpu"), torch.accelerator.current_accelerator())):
        try:
            return group._get_backend(device).options._timeout
        except (AttributeError, RuntimeError):
            continue
    return None


def create_syncbn_process_group(group_size: int) -> dist.ProcessGroup | None:
    """The process group of `group_size` neighbouring ranks that this rank belongs to.

    Every rank must make this call: it makes the groups of all of them. Call it once and hand the group to each
    layer, since no group is ever given up.

    Args:
        group_size: ranks that share statistics; divides the world size. 0: all ranks. 1: each rank alone.

    Returns:
        The group, or None (all ranks) for 0.

    Raises:
        ValueError: the world cannot be divided so.
        RuntimeError: torch.distributed is not initialized.
    """
    if group_size == 0:
        return None
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "create_syncbn_process_group: there is no process group to divide; call "
            "torch.distributed.init_process_group first"
        )
    world = dist.get_world_size()
    if not isinstance(group_size, int) or group_size < 0 or world % group_size:
        raise ValueError(
            f"create_syncbn_process_group: {world} ranks cannot be divided into groups of {group_size!r}; "
            "group_size must divide the world size"
        )
    firsts = range(0, world, group_size)
    timeout = timeout_of()
    with waiting("groups of a batch norm", CALLS):
        groups = [dist.new_group(list(range(first, first + group_size)), timeout=timeout) for first in firsts]
    return groups[dist.get_rank() // group_size]
