"""Delayed scaling's update of many histories, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from simt.test_fp8_update_scales import COLUMNS, THREADS, expected

MOST = 120


class Arguments(ctypes.Structure):
    """gpu::Fp8MultiUpdateScales."""

    _fields_ = [
        *((name, ctypes.c_uint64 * MOST) for name in ("history", "old")),
        *((name, ctypes.c_uint32 * MOST) for name in ("pitch", "column_pitch")),
        ("first", ctypes.c_uint32 * (MOST + 1)),
        ("first_block", ctypes.c_uint32 * MOST),
        ("count", ctypes.c_int32),
        *((name, ctypes.c_uint64) for name in ("scale", "scale_inv", "fp8_max", "rows")),
        ("factor", ctypes.c_float),
        ("most_recent", ctypes.c_int32),
        ("scale_inv_apart", ctypes.c_uint64),
    ]


@pytest.mark.parametrize("room", [None, 0, 3], ids=["rows", "upright", "roomy"])
@pytest.mark.parametrize("rows, most_recent", [(1, 0), (3, 1), (70, 0)])
@pytest.mark.parametrize("sizes", [(3,), (3, 2, 0, 20, 8), (1, 0)], ids=str)
def test_update(device, rows, sizes, most_recent, room):
    """room: columns lie one behind the other, with place for so many more rows; None: rows do."""
    rng = np.random.default_rng(rows)
    histories = [np.exp(rng.standard_normal((rows, n)) * 3).astype(np.float32) for n in sizes]
    histories[0][:, 0] = np.inf
    scales = [rng.random(n, np.float32) + 1 for n in sizes]
    first = np.cumsum([0, *sizes])
    blocks = np.cumsum([0, *(-(-n // COLUMNS) for n in sizes)])
    maximum = np.where(np.arange(first[-1]) % 2, 448, 57344).astype(np.float32)
    laid = histories
    if room is not None:
        laid = [np.pad(history.T, ((0, 0), (0, room)), constant_values=7) for history in histories]
    held = [[device.put(array) for array in arrays] for arrays in (laid, scales)]
    new, inverse = (device.put(np.zeros(first[-1], np.float32)) for _ in range(2))
    apart = device.put(np.full((first[-1], 4), 7, np.float32)) if most_recent else None
    numbers = device.put(maximum)
    given = Arguments(
        count=len(sizes), scale=new.address, scale_inv=inverse.address, fp8_max=numbers.address, rows=rows,
        factor=0.5, most_recent=most_recent, scale_inv_apart=apart.address if apart else 0,
    )  # fmt: skip
    for i, (history, old) in enumerate(zip(*held, strict=True)):
        given.history[i], given.old[i] = history.address, old.address
        given.pitch[i], given.column_pitch[i] = (sizes[i], 1) if room is None else (1, rows + room)
        given.first[i + 1], given.first_block[i] = first[i + 1], blocks[i]
    device.launch("fp8_multi_update_scales_f32", int(blocks[-1]), THREADS, [given])
    for i, (history, scale) in enumerate(zip(histories, scales, strict=True)):
        part = slice(first[i], first[i + 1])
        wanted = expected(history, scale, maximum[part], None, 0.5, most_recent)
        found = held[0][i].numpy()
        np.testing.assert_array_equal(found if room is None else found.T[:rows], wanted[0])
        assert room is None or (found.T[rows:] == 7).all()
        rtol = 2.0**-22 if device.emulated else 0  # its division is off by one unit in the last place
        np.testing.assert_allclose(new.numpy()[part], wanted[1], rtol=rtol)
        np.testing.assert_allclose(inverse.numpy()[part], wanted[2], rtol=rtol)
        np.testing.assert_array_equal(held[1][i].numpy(), scale)
    if apart:
        np.testing.assert_array_equal(apart.numpy()[:, 0], inverse.numpy())
        assert (apart.numpy()[:, 1:] == 7).all()
