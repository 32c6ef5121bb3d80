"""Which order of channels each space gets, and giving it to the parameters."""

from __future__ import annotations

import torch
import torch.distributed as dist

from apex.contrib.sparsity.permutation_search_kernels._magnitudes import kept_magnitude
from apex.contrib.sparsity.permutation_search_kernels.call_permutation_search_kernels import search
from apex.parallel._waiting import CALLS, waiting

# More than so many channels are searched by swaps alone, and for so long, as in public apex.
MOST_CHANNELS = 2048
SECONDS = 120
_NEGLIGIBLE = 1e-3  # of the magnitude is lost by pruning: no order keeps much more


def blocks_of(space, sparse):
    """[(first channel, weights [rows, block])] of a space: what its order is searched for. `sparse`: ids of tensors.

    Empty where the order cannot or need not change; the reason is the second result then, else None.
    """
    if space.frozen:
        return [], space.frozen
    if space.block % 4 or space.block < 8:
        return [], f"{space.block} channels are no two groups of 4"
    sites = [site for site in space.places if site.kind == "C" and id(site.tensor) in sparse]
    if not sites:
        return [], "no weight over it is pruned"
    if any(site.offset % 4 for site in sites):
        return [], "it lies across groups of 4"
    found = []
    for begin in range(0, space.size, space.block):
        matrices = [m for site in sites if (m := site.columns(begin, space.block)) is not None]
        if matrices:
            found.append((begin, torch.cat([m.to(matrices[0].device, torch.float32) for m in matrices])))
    return found, None


def _searched(matrix):
    """A good order of a matrix's columns, as a list; None where none is needed."""
    whole = matrix.abs().sum(dtype=torch.float64).item()
    if whole == 0 or not (whole - kept_magnitude(matrix)) / whole >= _NEGLIGIBLE:
        return None
    options = {"strategy": "exhaustive", "stripe_group_size": 8, "escape_attempts": 100}
    if matrix.shape[1] > MOST_CHANNELS:
        options = {"strategy": "progressive channel swap", "progressive_search_time_limit": SECONDS}
    return search(matrix, options)


def order_of(space, sparse):
    """(the order of all its channels or None, why there is none)."""
    blocks, reason = blocks_of(space, sparse)
    if not blocks:
        return None, reason
    order, changed = list(range(space.size)), False
    for begin, matrix in blocks:
        found = _searched(matrix)
        if found is not None:
            order[begin : begin + len(found)] = [begin + column for column in found]
            changed = True
    return (order, None) if changed else (None, "pruning loses next to nothing")


def _ranks(spaces):
    """(rank, world size) to divide the search by: (0, 1) unless every rank of the default group has such a model."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return 0, 1
    shapes = [[(s.name, tuple(s.tensor.shape), s.place[1:]) for s in space.places] for space in spaces]
    mine = shapes, [space.frozen for space in spaces]
    everyone: list = [None] * dist.get_world_size()
    with waiting("comparing models before channels are reordered", CALLS, "ASP"):
        dist.all_gather_object(everyone, mine)
    alike = all(other == shapes for other, _ in everyone)
    if alike:
        for rank, (_, frozen) in enumerate(everyone):
            for space, why in zip(spaces, frozen, strict=True):
                if why:  # there alone, if the optimizer has a state on that rank alone
                    space.freeze(f"on rank {rank}: {why}")
    elif all(_tensors(other) == _tensors(shapes) for other, _ in everyone):
        for space in spaces:
            space.freeze("ranks have the same layers, and follow their channels differently")
    return (dist.get_rank(), dist.get_world_size()) if alike else (0, 1)


def _tensors(shapes):
    return {site[:2] for space in shapes for site in space}


def orders_of(spaces, sparse):
    """[(order or None, reason)] of all spaces. Ranks with the same model share the search and its result."""
    rank, world = _ranks(spaces)
    mine = {index: order_of(spaces[index], sparse) for index in range(rank, len(spaces), world)}
    if world > 1:
        everyone: list = [None] * world
        with waiting("the orders of channels that each rank searched", CALLS, "ASP"):
            dist.all_gather_object(everyone, mine)
        mine = {index: found for part in everyone for index, found in part.items()}
    return [mine[index] for index in range(len(spaces))]


@torch.no_grad()
def apply_orders(orders, followers):
    """Gives the parameters of spaces their orders, [(space, order)]; all of them or, after an error, none.

    followers(tensor): other tensors that go with it. Returns what `undo` takes.
    """
    done: list = []
    try:
        for space, order in orders:
            index = torch.tensor(order, dtype=torch.int64, device="cpu")
            for site in space.places:
                for tensor in (site.tensor.detach(), *followers(site.tensor)):
                    site.permute(tensor, index)
                    done.append((site, tensor, index.argsort()))
    except BaseException:
        undo(done)
        raise
    return done


@torch.no_grad()
def undo(done):
    """Takes back what apply_orders did, the last first."""
    while done:
        site, tensor, back = done.pop()
        site.permute(tensor, back)
