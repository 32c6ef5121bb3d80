"""The table that multi-tensor kernels read (csrc/device/multi_tensor_table.h), built on a test's device."""

from __future__ import annotations

import ctypes

import numpy as np

from simt.device import Buffer, Device
from simt.structs import make

THREADS = 512  # multi_tensor_threads


def tensor_table(
    device: Device, lists: list[list[Buffer | None]], sizes, chunk_size: int
) -> ctypes.Structure:
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
    return make(
        "TensorTable",
        "multi_tensor_table.h",
        addresses=device.addresses(flat),
        sizes=device.put(sizes),
        first_chunk=device.put(first),
        tensors=len(sizes),
        chunks=int(first[-1]),
        chunk_size=chunk_size,
        tensors_with_chunks=int(np.count_nonzero(sizes)),
    )


def reduction_scratch(
    device: Device, table: ctypes.Structure, reductions: int = 1, run: int = 1
) -> tuple[ctypes.Structure, Buffer]:
    """gpu::ReductionScratch of one launch over `table`, and its counters.

    run: chunks that a block takes before it reduces. Partial results and totals hold a NaN at first: whoever
    reads one before it is written shows.
    """
    done = device.full(table.tensors + 1, 0, np.uint32)
    scratch = make(
        "ReductionScratch",
        "multi_tensor_reduce.h",
        partials=device.full((reductions, -(-table.chunks // run) + table.tensors), np.nan, np.float64),
        totals=device.full((reductions, table.tensors), np.nan, np.float64),
        done=done,
        run=run,
        runs=-(-table.chunks // run),
    )
    return scratch, done
