"""2:4 pruning of matrices, tensors or numpy arrays, and comparing orders of their columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from apex.contrib.sparsity.permutation_search_kernels import _magnitudes
from apex.contrib.sparsity.sparse_masklib import mn_1d_best


def use_gpu(initial_override: bool = True) -> bool:
    """Whether there is a GPU that torch sees. A search runs where its matrix is."""
    return initial_override and torch.cuda.is_available()


def apply_2_to_4(matrix: Any) -> Any:
    """Puts zeros, in place, where the matrix has the two smallest magnitudes of each four along a row."""
    dropped = mn_1d_best(_magnitudes.as_tensor(matrix), 4, 2) == 0
    matrix[_magnitudes.like(dropped, matrix)] = 0  # a product with 0 would leave infinities NaN
    return matrix


def sum_after_2_to_4(matrix: Any) -> float:
    """The sum of magnitudes that 2:4 pruning keeps. Raises ValueError for columns that are no multiple of 4."""
    return _magnitudes.kept_magnitude(matrix)


def unstructured_prune(matrix: Any, sparsity: float) -> Any:
    """A copy whose smallest elements, that fraction of them, are zero. Raises ValueError for no fraction."""
    _check_fraction("sparsity", sparsity)
    tensor = _magnitudes.tensor_of(matrix)
    flat = tensor.flatten().clone()
    flat[torch.argsort(flat, stable=True)[: int(flat.numel() * sparsity)]] = 0
    return _magnitudes.like(flat.view(tensor.shape), matrix)


def _check_fraction(name, value):
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is a fraction, 0 to 1, not {value}")


def try_swap(matrix: Any, dst: int, src: int) -> tuple[float, float]:
    """(what is kept of the two stripes after columns `dst` and `src` are swapped, how much more that is)."""
    tensor = _magnitudes.as_tensor(matrix)
    stripes = sorted({dst // 4, src // 4})
    columns = [4 * stripe + i for stripe in stripes for i in range(4)]
    swapped = [{dst: src, src: dst}.get(column, column) for column in columns]
    before, after = (_magnitudes.kept_magnitude(tensor[:, chosen]) for chosen in (columns, swapped))
    return after, after - before


def efficacy(optimal_lost_magnitude: float, base_lost_magnitude: float, cur_lost_magnitude: float) -> float:
    """How much of what could be gained is gained, 0 to 1."""
    gap = base_lost_magnitude - optimal_lost_magnitude
    return 1.0 if gap == 0 else (base_lost_magnitude - cur_lost_magnitude) / gap


def magnitude_after_pruning_rows(matrix: Any, rate: float = 0.5) -> float:
    """What is kept where each row loses that fraction of its elements, the smallest, wherever they are. Raises
    ValueError for no fraction."""
    _check_fraction("rate", rate)
    tensor = _magnitudes.tensor_of(matrix).abs().double()
    return tensor.sort(1).values[:, int(tensor.shape[1] * rate) :].sum().item()


def try_permutations_on_matrix(matrix: Any, permutations: Any) -> tuple[float, Any]:
    """(how much more is kept, the order) of the best of some orders of all columns; the first is what the others
    are compared with. Raises ValueError where one does not name each column once, or there is none."""
    tensor = _magnitudes.as_tensor(matrix)
    orders = torch.as_tensor(permutations, dtype=torch.int64, device="cpu")
    each = torch.arange(tensor.shape[1], dtype=torch.int64, device="cpu")
    if orders.dim() != 2 or not len(orders) or orders.shape[1] != len(each):
        raise ValueError(f"permutations are [orders, {len(each)} columns], not {list(orders.shape)}")
    if not (orders.sort(1).values == each).all():
        raise ValueError(f"an order names each of the {len(each)} columns once")
    group = each.to(tensor.device, torch.int32)[None]
    gains, which, _ = _magnitudes.best_orders(_magnitudes.columns_of(tensor), group, orders)
    return gains.item(), permutations[which.item()]


def find_permutation(A: Any, B: Any) -> list[int]:
    """For each column of A, the first column of B that equals it."""
    first, second = _magnitudes.tensor_of(A), _magnitudes.tensor_of(B)
    found: list[int] = []
    for column in first.split(1, dim=1):
        found += (second == column).all(0).nonzero().flatten()[:1].tolist()
    return found


def make_grouped(A: Sequence[int]) -> list[list[int]]:
    """An order's fours, each sorted."""
    return [sorted(int(column) for column in A[i : i + 4]) for i in range(0, len(A), 4)]


def common_groups(A: Sequence[int], B: Sequence[int]) -> list[list[int]]:
    """The fours that two orders share."""
    others = make_grouped(B)
    return [group for group in make_grouped(A) if group in others]


def remove_common_groups(A: Sequence[int], B: Sequence[int]) -> tuple[list[int], list[int]]:
    """Two orders without the fours that they share."""
    shared = common_groups(A, B)
    left = [[group for group in make_grouped(order) if group not in shared] for order in (A, B)]
    return sum(left[0], []), sum(left[1], [])


def group_differences(A: Sequence[int], B: Sequence[int]) -> list[tuple[int, int, int]]:
    """(column, its four in B, its four in A) of the columns that are in different fours."""
    place = {int(column): index // 4 for index, column in enumerate(A)}
    at = [(int(column), index // 4) for index, column in enumerate(sum(make_grouped(B), []))]
    return [(column, four, place[column]) for column, four in at if place[column] != four]


def dictify(wrong_entries: Sequence[tuple[int, int, int]]) -> dict[tuple[int, int], list[int]]:
    """{(four, wanted four): columns} of ``group_differences``."""
    found: dict[tuple[int, int], list[int]] = {}
    for column, four, wanted in wrong_entries:
        found.setdefault((four, wanted), []).append(column)
    return found


def swap_and_correct(permutation: Sequence[int], src: int, tgt: int) -> list[int]:
    """The order with two entries exchanged, its fours sorted."""
    made = list(permutation)
    made[src], made[tgt] = made[tgt], made[src]
    return sum(make_grouped(made), [])
