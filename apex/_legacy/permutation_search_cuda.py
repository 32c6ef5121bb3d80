"""The functions of public apex's permutation_search_cuda: they write to the caller's arrays and give 0.

Arrays are numpy's, as there, or tensors; of any shape, row by row. A tensor is worked on where it is, a numpy array by
the current GPU if torch sees one.
"""

from __future__ import annotations

import torch

from apex._legacy._raw import raw as _raw
from apex.contrib.sparsity.permutation_search_kernels import _magnitudes

__all__ = ["build_permute_map", "build_swap_map", "check_permutations", "sum_after_2_to_4"]


def _matrix(op, array, rows, cols):
    """The matrix as float32 [columns, rows], where it is worked on."""
    given = _magnitudes.tensor_of(array)
    if cols % 4:
        raise ValueError(f"permutation_search_cuda.{op}: {cols} columns are no multiple of 4 columns")
    if given.numel() != rows * cols:
        raise ValueError(
            f"permutation_search_cuda.{op}: matrix has {given.numel()} elements, not {rows} x {cols}"
        )
    home = given.device if torch.is_tensor(array) or not torch.cuda.is_available() else torch.device("cuda")
    return _magnitudes.columns_of(given.to(home).view(rows, cols))


def _integers(array, *shape):
    return torch.as_tensor(array, dtype=torch.int64, device="cpu").reshape(shape)


def _columns_of_stripes(op, stripes, columns):
    """int32 [groups, 4 * stripes of each] on the columns' device."""
    count = len(columns) // 4
    if stripes.numel() and not 0 <= stripes.min() <= stripes.max() < count:
        raise ValueError(f"permutation_search_cuda.{op}: stripes are in [0, {count})")
    four = torch.arange(4, dtype=torch.int64, device="cpu")
    return (4 * stripes[..., None] + four).flatten(1).to(columns.device, torch.int32)


def _orders(op, array, length):
    orders = _integers(array, -1, length)
    if not torch.equal(
        orders.sort(1).values, torch.arange(length, dtype=torch.int64, device="cpu").expand_as(orders)
    ):
        raise ValueError(f"permutation_search_cuda.{op}: each order has every column in [0, {length}) once")
    return orders


def _write(op, name, to, values):
    """Into the caller's array."""
    given = _magnitudes.tensor_of(to)
    if given.numel() < values.numel():
        raise ValueError(
            f"permutation_search_cuda.{op}: {name} has {given.numel()} elements, not {values.numel()}"
        )
    given.view(-1)[: values.numel()].copy_(values.flatten().to(given.dtype))


@_raw
def sum_after_2_to_4(matrix, rows, cols, start_col, end_col, blocks, threads, output):
    """output[0]: what 2:4 pruning keeps of the columns [start_col, end_col). blocks and threads are chosen here."""
    op = "sum_after_2_to_4"
    columns = _matrix(op, matrix, rows, cols)
    if start_col % 4 or end_col % 4 or not 0 <= start_col <= end_col <= cols:
        raise ValueError(
            f"permutation_search_cuda.{op}: columns [{start_col}, {end_col}) of {cols} are no groups of 4"
        )
    total = _magnitudes.kept_magnitude(columns[start_col:end_col].t())
    _write(op, "output", output, torch.tensor([total], dtype=torch.float64, device="cpu"))
    return 0


@_raw
def build_permute_map(
    matrix,
    rows,
    cols,
    stripes,
    num_groups,
    group_width,
    permutations,
    perm_length,
    improvements,
    best_indices,
):
    """For each group of stripes, how much more its best order keeps than the first, and which order that is."""
    op = "build_permute_map"
    columns, orders = _matrix(op, matrix, rows, cols), _orders(op, permutations, perm_length)
    groups = _columns_of_stripes(op, _integers(stripes, num_groups, group_width), columns)
    gains, which, _ = _magnitudes.best_orders(columns, groups, orders)
    _write(op, "improvements", improvements, gains)
    _write(op, "best_indices", best_indices, which)
    return 0


@_raw
def check_permutations(
    matrix,
    rows,
    cols,
    stripe_groups,
    group_width,
    num_groups,
    permutations,
    num_permutations,
    improvement,
    permutation,
):
    """The same of the first group alone."""
    first = _integers(stripe_groups, num_groups, group_width)[:1]
    arguments = (
        matrix,
        rows,
        cols,
        first,
        1,
        group_width,
        permutations,
        4 * group_width,
        improvement,
        permutation,
    )
    return build_permute_map(*arguments)


@_raw
def build_swap_map(matrix, rows, cols, stripe_pairs, output):
    """output [pairs, 16]: how much more is kept after columns i // 4 of the first stripe and i % 4 of the second are
    swapped."""
    op = "build_swap_map"
    columns = _matrix(op, matrix, rows, cols)
    groups = _columns_of_stripes(op, _integers(stripe_pairs, -1, 2), columns)
    _write(op, "output", output, _magnitudes.gains_of_swaps(columns, groups))
    return 0
