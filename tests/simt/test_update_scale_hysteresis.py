"""update_scale_hysteresis on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import numpy as np

from simt.structs import make


def test_a_run_of_steps(device):
    scale, found = device.full(1, 1024), device.full(1, 0)
    growth, left = device.full(1, 0, np.int32), device.full(1, 2, np.int32)
    arguments = make(
        "ScaleHysteresis",
        "update_scale_hysteresis.h",
        scale=scale,
        growth_tracker=growth,
        hysteresis_tracker=left,
        found_inf=found,
        growth_factor=1.7,
        backoff_factor=0.3,
        growth_interval=3,
        hysteresis=2,
    )
    now = np.float32(1024)
    # found_inf, scale grows or shrinks, growth_tracker, hysteresis_tracker
    steps = [
        (0, 1, 1, 2),
        (0, 1, 2, 2),
        (0, 1.7, 0, 2),
        (1, 1, 0, 1),
        (1, 0.3, 0, 0),
        (1, 0.3, 0, -1),
        (0, 1, 1, 2),
    ]
    for bad, factor, grown, tolerated in steps:
        found.fill_from(np.array([bad], np.float32))
        device.launch("update_scale_hysteresis_f32", 1, 1, [arguments])
        now = np.float32(np.float64(now) * factor)
        assert (scale.numpy()[0], growth.numpy()[0], left.numpy()[0]) == (now, grown, tolerated)
