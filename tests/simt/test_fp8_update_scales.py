"""Delayed scaling's update against its rule in numpy, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import numpy as np
import pytest

from simt.structs import make

THREADS, COLUMNS = 512, 8


def expected(history, scale, maximum, reduced, factor, most_recent):
    newest = history[0] if reduced is None else reduced
    rows = np.concatenate((newest[None], history[1:]))
    amax = newest if most_recent else rows.max(0)
    with np.errstate(all="ignore"):
        found = np.minimum(maximum / amax * np.float32(factor), np.finfo(np.float32).max)
    scale = np.where((amax > 0) & np.isfinite(amax), found, scale).astype(np.float32)
    rows = np.roll(rows, -1, 0)
    rows[0] = 0
    return rows, scale, np.float32(1) / scale


@pytest.mark.parametrize("most_recent, reduces", [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("rows, columns, pitch", [(1, 3, 3), (2, 9, 12), (70, 10, 10), (1030, 9, 9)])
def test_update(device, rows, columns, pitch, most_recent, reduces):
    rng = np.random.default_rng(rows)
    whole = np.exp(rng.standard_normal((rows, pitch)) * 3).astype(np.float32)
    history = whole[:, :columns]
    reduced = history[0] * np.float32(2) if reduces else None
    odd = np.float32([0.0, np.inf, np.nan, 1e-42])[: columns - 1]
    history[:, : len(odd)] = odd
    if reduces:
        reduced[: len(odd)] = odd
    scale = rng.random(columns, np.float32) + 1
    maximum = np.where(np.arange(columns) % 2, 448, 57344).astype(np.float32)
    wanted = expected(history, scale, maximum, reduced, 0.5, most_recent)
    buffers = {
        "amax_history": device.put(whole), "scale": device.put(scale), "scale_inv": device.put(scale * 0),
        "fp8_max": device.put(maximum), "reduced": device.put(reduced) if reduces else None,
    }  # fmt: skip
    arguments = make(
        "Fp8UpdateScales", "fp8_update_scales.h", rows=rows, columns=columns, pitch=pitch, column_pitch=1,
        factor=0.5, most_recent=most_recent, **buffers,
    )  # fmt: skip
    device.launch("fp8_update_scales_f32", -(-columns // COLUMNS), THREADS, [arguments])
    found = buffers["amax_history"].numpy()
    np.testing.assert_array_equal(found[:, :columns], wanted[0])
    np.testing.assert_array_equal(found[:, columns:], whole[:, columns:])
    if device.emulated:  # its division is off by one unit in the last place
        np.testing.assert_allclose(buffers["scale"].numpy(), wanted[1], rtol=2.0**-22)
        return
    np.testing.assert_array_equal(buffers["scale"].numpy(), wanted[1])
    np.testing.assert_array_equal(buffers["scale_inv"].numpy(), wanted[2])
