"""kept_magnitudes' kernel against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from simt.structs import make

THREADS = 128
FOURS = list(itertools.combinations(range(8), 4))


def wanted(columns, groups):
    """[groups, 70] by sorting."""
    x = np.abs(columns.astype(np.float64))[groups]
    return np.stack([np.sort(x[:, four], axis=1)[:, 2:].sum((1, 2)) for four in FOURS], axis=1)


# columns, rows, groups
@pytest.mark.parametrize("count, rows, many", [(16, 70, 5), (8, 1, 1), (12, 128, 9), (9, 200, 4)], ids=str)
def test_sums(device, count, rows, many):
    """Rows that no warp divides, columns that a group has twice; a group with an index outside is nan."""
    rng = np.random.default_rng(rows)
    columns = rng.standard_normal((count, rows)).astype(np.float32)
    groups = rng.integers(0, count, (many, 8)).astype(np.int32)
    groups[0] = np.arange(8)
    outside = np.zeros(many, bool)
    if many > 3:
        groups[1, 3], groups[many - 1, 7], outside[[1, many - 1]] = count, -1, True
    sums = device.put(np.full((many + 1, 70), 7, np.float32))
    arguments = make(
        "KeptMagnitudes", "kept_magnitudes_arguments.h", columns=device.put(columns), groups=device.put(groups),
        sums=sums, count=count, rows=rows, groups_count=many,
    )  # fmt: skip
    blocks = -(-many // (THREADS // device.warp_size)) if many < 9 else 1  # one block for all
    device.launch("kept_magnitudes_f32", blocks, THREADS, [arguments])
    found = sums.numpy()
    assert np.isnan(found[:many][outside]).all() and (found[many] == 7).all()
    expected = wanted(columns, np.where(outside[:, None], 0, groups))
    np.testing.assert_allclose(found[:many][~outside], expected[~outside], rtol=2e-6)


def test_magnitudes_of_special_values(device):
    """Signs do not matter, not of zeros either; an infinity is the largest."""
    columns = np.float32([[-0.0], [-3], [2], [np.inf], [1], [-1], [0.5], [-0.25]])
    groups = np.arange(8, dtype=np.int32)[None]
    sums = device.put(np.zeros((1, 70), np.float32))
    arguments = make(
        "KeptMagnitudes", "kept_magnitudes_arguments.h", columns=device.put(columns), groups=device.put(groups),
        sums=sums, count=8, rows=1, groups_count=1,
    )  # fmt: skip
    device.launch("kept_magnitudes_f32", 1, THREADS, [arguments])
    np.testing.assert_array_equal(sums.numpy(), wanted(columns, groups).astype(np.float32))
