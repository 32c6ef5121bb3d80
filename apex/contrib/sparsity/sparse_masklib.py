"""Masks of n:m sparsity: of each m weights along the input channels, the n largest in magnitude are kept.

Masks are computed where the weight is, without rounding: a float64 weight is compared in float64. NaN counts as the
largest magnitude.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch

_MOST_PATTERNS = 1_000_000
_BLOCKS_AT_ONCE = 65536  # of mn_2d_best, which compares each block with all patterns


def fill(x: torch.Tensor) -> float:
    """The fraction of elements of x that are not zero. Raises ValueError where x has none."""
    if not x.numel():
        raise ValueError(f"a tensor of shape {tuple(x.shape)} has no elements to count")
    return torch.count_nonzero(x).item() / x.numel()


def reshape_1d(matrix: torch.Tensor, m: int) -> tuple[torch.Tensor, torch.Size]:
    """A matrix [rows, columns] as [groups, m], and the shape that it had for that: rows are padded with zeros where m
    does not divide the columns."""
    rest = -matrix.shape[1] % m
    padded = torch.nn.functional.pad(matrix, (0, rest)) if rest else matrix
    return padded.reshape(-1, m), padded.shape


def _check_pattern(matrix, m, n):
    if matrix is not None and matrix.dim() != 2:
        raise ValueError(f"masks are of matrices [rows, columns], not of shape {tuple(matrix.shape)}")
    if matrix is not None and matrix.is_complex():
        raise TypeError(f"masks are of real weights, not of {matrix.dtype}: mask matrix.abs()")
    if not 0 < n <= m:
        raise ValueError(f"n:m sparsity keeps 0 < n <= m of m weights, not {n} of {m}")


def _magnitudes(matrix):
    if not matrix.is_floating_point():  # int64 holds them exactly, but for the magnitude of its least number
        return matrix.detach().long().clamp(min=-torch.iinfo(torch.int64).max).abs()
    wide = matrix if matrix.dtype == torch.float64 else matrix.float()
    return wide.detach().abs().nan_to_num(nan=float("inf"), posinf=float("inf"))


def _tensor_of_patterns(kept, m):
    """float32 [..., m] with ones at the kept indices. Made anew each time: a tensor that is made while fake tensors, a
    transform or inference mode are on is of use there alone."""
    columns = torch.tensor(kept, dtype=torch.int64, device="cpu")
    patterns = torch.zeros(*columns.shape[:-1], m, dtype=torch.float32, device="cpu")
    return patterns.scatter(-1, columns, 1)


def compute_valid_1d_patterns(m: int, n: int) -> torch.Tensor:
    """All patterns of n ones among m: float32 [patterns, m] on the CPU, in the order of the kept indices."""
    _check_pattern(None, m, n)
    return _tensor_of_patterns(list(itertools.combinations(range(m), n)), m)


def mn_1d_best(matrix: torch.Tensor, m: int, n: int) -> torch.Tensor:
    """The mask that keeps the n largest magnitudes of every m along a row; of equal ones, the first.

    Args:
        matrix: [rows, columns]. A last group of fewer than m columns keeps its n largest too.

    Returns:
        int32 zeros and ones of the matrix's shape. Raises ValueError for another number of dimensions.
    """
    _check_pattern(matrix, m, n)
    groups, shape = reshape_1d(_magnitudes(matrix), m)
    rank = torch.zeros(groups.shape, dtype=torch.int32, device=groups.device)
    for i, j in itertools.permutations(range(m), 2):  # how many of its group come before an element
        before = groups[:, i] >= groups[:, j] if i < j else groups[:, i] > groups[:, j]
        rank[:, j] += before
    return (rank < n).to(torch.int32).view(shape)[:, : matrix.shape[1]].contiguous()


def m4n2_1d(mat: torch.Tensor, density: float) -> torch.Tensor:
    """mn_1d_best of 2 in 4."""
    return mn_1d_best(mat, 4, 2)


def _blocks(matrix, m):
    """[blocks, m * m] of a matrix whose sides m divides."""
    rows, columns = (side // m for side in matrix.shape)
    return matrix.view(rows, m, columns, m).transpose(1, 2).reshape(rows * columns, m * m)


def _masked_in_blocks(matrix, m, mask_of_blocks):
    """The int32 mask made of the blocks' masks. What is left of rows and columns where m does not divide them stays."""
    mask = torch.ones(matrix.shape, dtype=torch.int32, device=matrix.device)
    rows, columns = (side // m for side in matrix.shape)
    if rows and columns:
        whole = (slice(rows * m), slice(columns * m))
        made = mask_of_blocks(_blocks(_magnitudes(matrix[whole]).contiguous(), m)).to(torch.int32)
        mask[whole] = made.view(rows, columns, m, m).transpose(1, 2).reshape(rows * m, columns * m)
    return mask


def mn_2d_greedy(matrix: torch.Tensor, m: int, n: int) -> torch.Tensor:
    """A mask that keeps at most n of every m along rows and along columns, found greedily in each m x m block.

    The block's elements are taken from the largest magnitude to the smallest (of equal ones, the last first); one is
    kept unless its row or its column has n already. Rows and columns beyond the last whole block are kept.

    Returns:
        int32 zeros and ones of the matrix's shape. Raises ValueError for another number of dimensions.
    """
    _check_pattern(matrix, m, n)
    return _masked_in_blocks(matrix, m, functools.partial(_greedy, m=m, n=n))


def _greedy(blocks, m, n):
    order = torch.argsort(blocks, dim=1, stable=True).flip(1)
    mask = torch.zeros(blocks.shape, dtype=torch.int32, device=blocks.device)
    in_row, in_column = (torch.zeros(len(blocks), m, dtype=torch.int32, device=blocks.device) for _ in "rc")
    for place in order.split(1, dim=1):
        row, column = place // m, place % m
        kept = ((in_row.gather(1, row) < n) & (in_column.gather(1, column) < n)).to(torch.int32)
        mask.scatter_(1, place, kept)
        in_row.scatter_add_(1, row, kept)
        in_column.scatter_add_(1, column, kept)
    return mask


def m4n2_2d_greedy(mat: torch.Tensor, density: float) -> torch.Tensor:
    """mn_2d_greedy of 2 in 4."""
    return mn_2d_greedy(mat, 4, 2)


def _patterns_below(rows, left, m, n, found):
    """Appends to `found` all patterns that begin with `rows`; `left`: how many more each column may have."""
    if len(rows) == m:
        found.append(rows)
        if len(found) > _MOST_PATTERNS:
            raise ValueError(f"there are too many patterns of {n} in {m} over {m} x {m} to try them all")
        return
    for kept in itertools.combinations([column for column in range(m) if left[column]], n):
        rest = [count - (column in kept) for column, count in enumerate(left)]
        _patterns_below([*rows, kept], rest, m, n, found)


@functools.cache
def _patterns_2d(m, n):
    found: list = []
    _patterns_below([], [n] * m, m, n, found)
    return found


def compute_valid_2d_patterns(m: int, n: int) -> torch.Tensor:
    """All m x m patterns with n ones in every row and column: float32 [patterns, m, m] on the CPU, in the order of the
    kept columns. Raises ValueError where they are more than a million."""
    _check_pattern(None, m, n)
    return _tensor_of_patterns(_patterns_2d(m, n), m)


def _summable(blocks):
    """float64 magnitudes whose sums are finite; one infinity is more than all else of its block together."""
    wide, infinite = blocks.double(), blocks == float("inf")
    finite = wide.masked_fill(infinite, 0)
    most = finite.amax(1, keepdim=True)
    scale = torch.ones_like(most).masked_fill(most > 1e290, 2.0**-64)  # a power of two rounds nothing
    instead = (most * scale * 2.0 * blocks.shape[1]).masked_fill(most == 0, 1.0)
    return torch.where(infinite, instead, finite * scale)


def mn_2d_best(matrix: torch.Tensor, m: int, n: int) -> torch.Tensor:
    """The mask that keeps n of every m along rows and along columns, and of those the most magnitude: all patterns are
    tried in each m x m block. Rows and columns beyond the last whole block are kept.

    Returns:
        int32 zeros and ones of the matrix's shape. Raises ValueError for another number of dimensions, and where
        there are too many patterns.
    """
    _check_pattern(matrix, m, n)
    patterns = _tensor_of_patterns(_patterns_2d(m, n), m).flatten(1).to(matrix.device, torch.float64)

    def best(blocks):
        parts = [torch.argmax(_summable(part) @ patterns.t(), 1) for part in blocks.split(_BLOCKS_AT_ONCE)]
        return patterns[torch.cat(parts)]

    return _masked_in_blocks(matrix, m, best)


def m4n2_2d_best(mat: torch.Tensor, density: float) -> torch.Tensor:
    """mn_2d_best of 2 in 4."""
    return mn_2d_best(mat, 4, 2)


_PATTERNS: dict[str, Callable] = {
    "m4n2_1d": m4n2_1d,
    "m4n2_2d_greedy": m4n2_2d_greedy,
    "m4n2_2d_best": m4n2_2d_best,
}

# A weight [K, C, ...] is masked as a matrix of C columns; by its number of dimensions, which order its rows have.
_ROWS_FIRST = {2: (0, 1), 3: (0, 2, 1), 4: (2, 3, 0, 1), 5: (2, 3, 4, 0, 1)}


def create_mask(tensor: torch.Tensor, pattern: str = "m4n2_1d", density: float = 0.5) -> torch.Tensor:
    """The mask of a weight, along its input channels.

    Args:
        tensor: [C], [K, C] or the weight of a convolution [K, C, ...] in up to three dimensions, floating point.
        pattern: m4n2_1d, the two largest of four; m4n2_2d_greedy and m4n2_2d_best, two of four along K as well.
        density: goes to the pattern's function; 2:4 patterns keep half, whatever it is.

    Returns:
        Zeros and ones of the tensor's shape, dtype and device. Raises ValueError and TypeError.
    """
    if not torch.is_tensor(tensor) or not isinstance(pattern, str):
        raise TypeError(
            f"create_mask takes a tensor and a pattern's name, not {type(tensor).__name__} and "
            f"{type(pattern).__name__}: torch.from_numpy makes a tensor of an array"
        )
    if pattern not in _PATTERNS:
        raise ValueError(f"no pattern {pattern!r}: there are {', '.join(_PATTERNS)}")
    if not tensor.is_floating_point():
        raise TypeError(f"masks are of floating-point weights, not of {tensor.dtype}")
    if not 1 <= tensor.dim() <= 5:
        raise ValueError(f"masks are of weights of 1 to 5 dimensions, not of shape {tuple(tensor.shape)}")
    if not tensor.numel():
        return torch.zeros_like(tensor.detach())
    weight = tensor.detach() if tensor.dim() > 1 else tensor.detach()[None]
    order = _ROWS_FIRST[weight.dim()]
    turned = weight.permute(order)
    mask = _PATTERNS[pattern](turned.reshape(-1, turned.shape[-1]), density)
    back = sorted(range(len(order)), key=order.__getitem__)
    return mask.view(turned.shape).permute(back).reshape(tensor.shape).to(tensor.dtype)
