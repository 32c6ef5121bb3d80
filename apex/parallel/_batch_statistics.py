"""Statistics of a batch norm's channels over the batches of several ranks: one all-gather, one all-reduce."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from apex import _functional
from apex._loader import bindings
from apex.parallel._waiting import waiting
from apex.parallel.process_groups import is_gloo

bindings.load()


def call(name, *arguments):
    """The results of an op of batch norm; arguments in the order of its schema."""
    return _functional.call(name, getattr(torch.ops.apex, name).default, None, arguments)


def others_in(process_group):
    """The ranks to speak with (None: all), or None where there is nobody else."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if process_group is None else process_group
    return group if dist.get_world_size(group) > 1 else None


_agreed: weakref.WeakKeyDictionary = (
    weakref.WeakKeyDictionary()
)  # layer -> (its group, weakly; channels; math)


def agree(layer, group, channels, input):
    """Before a layer's first batch, or its first in another group or dtype: all ranks must have the same channels.

    Statistics of different lengths would be gathered into what is nobody's, or never come. It is one message of two
    numbers, which the host waits for; nothing while something is traced or captured, where hosts cannot wait.

    Args:
        layer: the module, the same on all ranks.
        group: the ranks that share statistics; None: nobody else.
        channels: of this rank.
        input: its batch.

    Raises:
        ValueError: on every rank of the group, that not all have the same.
    """
    if group is None or torch.compiler.is_compiling() or _captures(input.device):
        return
    math = "float64" if input.dtype == torch.float64 else "float32"
    known = _agreed.get(layer)
    if known is not None and known[0]() is group and known[1:] == (channels, math):
        return
    mine = torch.tensor([channels, math == "float64"], dtype=torch.int64, device=input.device)
    found = mine.new_empty(dist.get_world_size(group), 2)
    with waiting("a batch norm's statistics", group=group) as wait:
        _gather_into(wait, found, mine, group)
    rows = found.tolist()
    if any(row != rows[0] for row in rows):
        said = ", ".join(
            f"rank {dist.get_global_rank(group, i)} has {count}{', float64' if double else ''}"
            for i, (count, double) in enumerate(rows)
        )
        raise ValueError(
            f"{type(layer).__name__}: ranks that share statistics must have as many channels, and float64 on all or on "
            f"none: {said}. Build the same module on every rank, or give process groups of ranks that have"
        )
    _agreed[layer] = (weakref.ref(group), channels, math)


def _captures(device):
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _gather(statistics, group):
    """[ranks, numbers], every rank's."""
    if torch.compiler.is_compiling():
        from torch.distributed import _functional_collectives as functional

        return functional.all_gather_tensor(statistics.unsqueeze(0), 0, group)
    gathered = statistics.new_empty(dist.get_world_size(group), statistics.numel())
    with waiting("a batch norm's statistics", group=group) as wait:
        _gather_into(wait, gathered, statistics, group)
    return gathered


def _gather_into(wait, gathered, statistics, group):
    if is_gloo(group, statistics.device):  # before torch 2.9 it has no all_gather_into_tensor
        wait.run(dist.all_gather, list(gathered.unbind(0)), statistics, group=group)
    else:
        wait.run(dist.all_gather_into_tensor, gathered, statistics, group=group)


def add_up(sums, group):
    """The sums of all ranks, perhaps in place; None as group: of this rank alone."""
    if group is None:
        return sums
    if torch.compiler.is_compiling():
        from torch.distributed import _functional_collectives as functional

        return functional.all_reduce(sums, "sum", group)
    with waiting("a batch norm's gradients", group=group) as wait:
        wait.run(dist.all_reduce, sums, group=group)
    return sums


def of_batch(
    input, channel_last, group, eps, running_mean=None, running_var=None, momentum=0.0, batches=None
):
    """(mean, 1 / sqrt(biased variance + eps), [count]) of each channel, over all ranks of `group` (None: this one).

    Running statistics, if given, are brought up to date: by `momentum`, or as averages over so many `batches`.

    Raises:
        ValueError: one value a channel, and no other rank.
    """
    statistics = call("welford_mean_var", input, channel_last)
    channels = statistics.numel() // 2
    if group is None:
        if input.numel() == channels:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {input.size()}"
            )
        gathered = statistics.unsqueeze(0)
    else:
        gathered = _gather(statistics, group)
    mean, _, inv_std, count = call(
        "welford_parallel",
        gathered[:, :channels],
        gathered[:, channels : 2 * channels],
        gathered[:, 2 * channels],
        eps,
        running_mean,
        running_var,
        momentum,
        batches,
    )
    return mean, inv_std, count


def of_running(running_mean, running_var, eps, dtype):
    """(mean, 1 / sqrt(variance + eps)) of running statistics, float32 (float64 for inputs of that dtype)."""
    math = torch.float64 if dtype == torch.float64 else torch.float32
    return running_mean.to(math), torch.rsqrt(running_var.to(math) + eps)
