"""The table that multi-tensor kernels read (csrc/device/multi_tensor_table.h), built on a test's device."""

from __future__ import annotations

import ctypes

import numpy as np

from simt.device import Buffer, Device

THREADS = 512  # multi_tensor_threads


class TensorTable(ctypes.Structure):
    """gpu::TensorTable, passed by value; its pointers are device addresses."""

    _fields_ = [
        ("addresses", ctypes.c_uint64),
        ("sizes", ctypes.c_uint64),
        ("first_chunk", ctypes.c_uint64),
        ("tensors", ctypes.c_uint32),
        ("chunks", ctypes.c_uint32),
        ("chunk_size", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


def tensor_table(device: Device, lists: list[list[Buffer | None]], sizes, chunk_size: int) -> TensorTable:
    """A table in device memory.

    Args:
        device: where.
        lists: [lists][tensors] buffers; None in the first list leaves a tensor out.
        sizes: [tensors], in elements.
        chunk_size: elements that a block takes at once.
    """
    sizes = np.asarray(sizes, np.int64)
    first = np.concatenate([[0], np.cumsum(-(-sizes // chunk_size))]).astype(np.uint32)
    flat = [buffer for tensors in lists for buffer in tensors]
    return TensorTable(
        device.addresses(flat).address,
        device.put(sizes).address,
        device.put(first).address,
        len(sizes),
        int(first[-1]),
        chunk_size,
        0,
    )
