"""The kernel that writes a run of words into a tensor table, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

MOST = 500  # table_words_per_launch
UNTOUCHED = 0xDEAD_BEEF_DEAD_BEEF


class TableWords(ctypes.Structure):
    """gpu::TableWords, which holds its words by value."""

    _fields_ = [
        ("destination", ctypes.c_uint64),
        ("count", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("words", ctypes.c_uint64 * MOST),
    ]


@pytest.mark.parametrize("count", [0, 1, 31, 64, 499, MOST])
def test_a_run_of_words(device, count):
    """Words of all 64 bits arrive, those beside the run stay as they were."""
    words = np.random.default_rng(count).integers(0, 2**64, MOST, np.uint64)
    table = device.full(MOST + 2, UNTOUCHED, np.uint64)
    run = TableWords(table.address + 8, count, 0, tuple(words.tolist()))
    device.launch("multi_tensor_table_write", 1, 512, [run])
    expected = np.full(MOST + 2, UNTOUCHED, np.uint64)
    expected[1 : 1 + count] = words[:count]
    np.testing.assert_array_equal(table.numpy(), expected)
