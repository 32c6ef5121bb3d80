"""What 2:4 pruning keeps of a matrix, and how the search for a better order of its columns evaluates many at once."""

from __future__ import annotations

import functools
import itertools
import math
import random
import threading
from collections.abc import Callable
from typing import Any

import torch

from apex._functional import call

_GROUPS_AT_ONCE = 8192
_WIDE = (torch.float64, torch.int32, torch.int64)  # float32 does not hold all of their numbers
_MOST = 1e37  # sums of magnitudes above this are scaled, since they come near to what float32 holds
_seed = 1
generator = random.Random(_seed)


def seed(value: int | None = None) -> None:
    """Starts the search's random numbers anew; value: from another seed from now on."""
    global _seed
    _seed = _seed if value is None else value
    generator.seed(_seed)


def tensor_of(array: Any) -> torch.Tensor:
    """A tensor as it is; a numpy array as a tensor that shares its memory."""
    return array.detach() if torch.is_tensor(array) else torch.from_numpy(array)


def _refuse_complex(tensor):
    if tensor.is_complex():
        raise TypeError(f"2:4 sparsity is of real weights, not of {tensor.dtype}: give their abs()")


def as_tensor(matrix: Any) -> torch.Tensor:
    """A matrix [rows, columns], a tensor or a numpy array, as a float32 or float64 tensor. Raises ValueError,
    and TypeError for complex numbers."""
    tensor = tensor_of(matrix)
    _refuse_complex(tensor)
    if tensor.dim() != 2 or tensor.shape[1] % 4:
        raise ValueError(
            f"2:4 sparsity is of matrices with a multiple of 4 columns, not of {tuple(tensor.shape)}"
        )
    return tensor.double() if tensor.dtype in _WIDE else tensor.float()


def like(tensor, matrix):
    """A tensor as what `matrix` is, a tensor or a numpy array."""
    return tensor if torch.is_tensor(matrix) else tensor.numpy()


def _kept(matrix):
    """[rows, groups of 4] of what is kept of each four of consecutive columns."""
    a, b, c, d = matrix.abs().unflatten(1, (-1, 4)).unbind(-1)
    across = torch.maximum(a, b) + torch.maximum(c, d)
    return torch.maximum(torch.maximum(a + b, c + d), across)


def kept_magnitude(matrix: Any) -> float:
    """The sum of the two largest magnitudes of every four along the rows."""
    return _kept(as_tensor(matrix)).sum(dtype=torch.float64).item()


def kept_magnitudes(columns: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """By whatever serves it here; apex.reference.kept_magnitudes says what it is."""
    return call("kept_magnitudes", torch.ops.apex.kept_magnitudes.default, 1, (columns, groups))


def columns_of(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix as ``kept_magnitudes`` takes it: float32 [columns, rows]. Raises TypeError for complex numbers."""
    _refuse_complex(matrix)
    return matrix.float().t().contiguous()


def summable(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix, or one whose columns compare alike and whose sums are finite in float32: magnitudes too large for
    that are scaled by a power of two, and infinities and NaN are the largest magnitude."""
    whole = matrix.abs().sum(dtype=torch.float64).item()
    if whole < _MOST:
        return matrix
    wide = matrix.abs().double()
    finite = wide.nan_to_num(nan=0.0, posinf=0.0)
    most = finite.max().item()
    wide = torch.where(wide.isfinite(), finite, most or 1.0)
    _, exponent = math.frexp((most or 1.0) * matrix.numel())
    return (wide * 2.0 ** (100 - exponent)).float() if exponent > 100 else wide.float()


# ---- all ways to split a few columns into fours ------------------------------------------------------


def _table(make: Callable) -> Callable:
    """functools.cache for tensors. They are made in a thread, where no mode of the caller's is on, since one made with
    fake tensors, under a transform or in inference mode would be of no use to later calls."""
    made: dict[tuple, Any] = {}

    @functools.wraps(make)
    def table(*key):
        if key not in made:
            failed = []

            def work():
                try:
                    made[key] = make(*key)
                except BaseException as error:
                    failed.append(error)

            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            if failed:
                raise failed[0]
        return made[key]

    return table


@_table
def _fours(count):
    """[fours, 4] of `count` columns, in the order of itertools.combinations."""
    return torch.tensor(list(itertools.combinations(range(count), 4)), dtype=torch.int64, device="cpu")


@_table
def splits(count: int) -> torch.Tensor:
    """[ways, count]: every way to split 4, 8, 12 or 16 columns into fours, each and all of them sorted; the first
    leaves the columns where they are."""
    if count == 4:
        return torch.arange(4, dtype=torch.int64, device="cpu")[None]
    rest_of = splits(count - 4)
    with_first = _fours(count)[_fours(count)[:, 0] == 0]
    is_left = torch.ones(len(with_first), count, dtype=torch.bool, device="cpu").scatter_(
        1, with_first, False
    )
    left = is_left.nonzero()[:, 1].view(len(with_first), count - 4)
    rest = left[:, rest_of.flatten()].view(len(with_first), len(rest_of), count - 4)
    first = with_first[:, None].expand(-1, len(rest_of), -1)
    return torch.cat([first, rest], 2).flatten(0, 1)


@_table
def _index_of_fours(count):
    """[count^4 as a sparse lookup]: number of a sorted four, by its columns as digits to the base `count`."""
    digits = torch.tensor([count**3, count**2, count, 1], dtype=torch.int64, device="cpu")
    table = torch.full((count**4,), -1, dtype=torch.int64, device="cpu")
    fours = _fours(count)
    table[fours @ digits] = torch.arange(len(fours), dtype=torch.int64, device="cpu")
    return table, digits


def fours_of(orders: torch.Tensor) -> torch.Tensor:
    """[ways, fours]: which four of ``_fours`` each four of an order is, whatever its own order."""
    table, digits = _index_of_fours(orders.shape[1])
    return table[orders.unflatten(1, (-1, 4)).sort(-1).values @ digits]


@_table
def _eights(count):
    """(columns [eights, 8], places [fours]): eights that together hold every four of `count` columns, and where each
    four is among the results of all eights."""
    pairs = itertools.combinations(range(count // 2), 4)
    eights = torch.tensor([[2 * p + i for p in chosen for i in (0, 1)] for chosen in pairs], dtype=torch.int64,
                          device="cpu")  # fmt: skip
    found = eights[:, _fours(8).flatten()].view(-1, 4)
    table, digits = _index_of_fours(count)
    places = torch.empty(len(_fours(count)), dtype=torch.int64, device="cpu")
    places[table[found @ digits]] = torch.arange(len(found), dtype=torch.int64, device="cpu")
    return eights, places


def sums_of_fours(columns: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """[groups, fours]: what is kept of every four of a group's 8, 12 or 16 columns. groups: int32 [groups, columns]."""
    count = groups.shape[1]
    if count == 8:
        return kept_magnitudes(columns, groups.contiguous())
    eights, places = (table.to(columns.device) for table in _eights(count))
    sums = kept_magnitudes(columns, groups[:, eights.flatten()].reshape(-1, 8))
    return sums.view(len(groups), -1)[:, places]


def _totals(columns, groups, orders):
    """[groups, orders]: what is kept of each group in each order of its columns."""
    if groups.shape[1] not in (8, 12, 16):
        magnitudes = columns[groups.long()]
        each = [_kept(magnitudes[:, order].transpose(1, 2).flatten(0, 1)) for order in orders]
        return torch.stack([kept.reshape(len(groups), -1).sum(1) for kept in each], 1)
    fours = fours_of(orders.cpu()).to(columns.device)
    sums = sums_of_fours(columns, groups)
    totals = sums[:, fours[:, 0]]
    for four in fours[:, 1:].unbind(1):
        totals += sums[:, four]
    return totals


def best_orders(columns: torch.Tensor, groups: torch.Tensor, orders: torch.Tensor) -> tuple:
    """(improvement, which order, what is kept without) of each group: the best of some orders of its columns.

    Args:
        columns: float32 [columns, rows].
        groups: int32 [groups, a multiple of 4], indices of columns; 8, 12 and 16 are fast.
        orders: int64 [orders, as many], the first of which is to be improved on.

    Returns:
        float32, int64 and float32 [groups] on the CPU. Of equal orders the first is taken.
    """
    found = []
    for part in groups.split(max(1, _GROUPS_AT_ONCE * 35 // len(orders))):
        totals = _totals(columns, part, orders)
        best, which = totals.max(1)
        found.append((best - totals[:, 0], which, totals[:, 0]))
    if not found:
        return tuple(
            torch.empty(0, dtype=t, device="cpu") for t in (torch.float32, torch.int64, torch.float32)
        )
    return tuple(torch.cat(parts).cpu() for parts in zip(*found, strict=True))


# ---- swaps of two columns ----------------------------------------------------------------------------


@_table
def swap_orders() -> torch.Tensor:
    """int64 [17, 8]: two stripes as they are, and with the columns i // 4 and 4 + i % 4 swapped."""
    orders = torch.arange(8, dtype=torch.int64, device="cpu").repeat(17, 1)
    for swap in range(16):
        orders[swap + 1, swap // 4], orders[swap + 1, 4 + swap % 4] = 4 + swap % 4, swap // 4
    return orders


def gains_of_swaps(columns: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """float32 [groups, 16] on the CPU: how much more is kept of two stripes after each swap.

    groups: int32 [groups, 8].
    """
    found = [torch.empty(0, 16, dtype=torch.float32, device="cpu")]
    for part in groups.split(_GROUPS_AT_ONCE):
        totals = _totals(columns, part, swap_orders())
        found.append((totals[:, 1:] - totals[:, :1]).cpu())
    return torch.cat(found)
