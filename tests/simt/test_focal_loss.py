"""Focal-loss kernels against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from simt.element_types import DTYPES, ROUNDING, decode, encode
from simt.structs import make

TYPE = {"f32": 0, "f16": 1, "bf16": 2, "f64": 3}
ALPHA, SMOOTHING, POSITIVES, GRAD = 0.25, 0.1, 3.0, 0.5


@dataclass(frozen=True)
class Case:
    """offset: of the logits from a 16-byte boundary, in elements."""

    dtype: str
    rows: int
    classes: int
    real: int
    gamma: float = 2.0
    offset: int = 0
    wide: bool = True

    @property
    def math(self) -> str:
        return "f64" if self.dtype == "f64" else "f32"


CASES = [
    Case("bf16", 9, 21, 19),
    Case("f16", 4, 24, 20, gamma=0.0, wide=False),
    Case("f32", 30, 7, 7, gamma=1.5),
    Case("bf16", 5, 11, 11, offset=3),
    Case("f64", 5, 9, 8),
]


def oracle(x, targets, case):
    """(loss, gradient) in float64"""
    real, rows = x[:, : case.real], np.arange(case.rows)
    positive = targets[:, None] == np.arange(case.real)
    t = np.where(positive, 1 - SMOOTHING / 2, SMOOTHING / 2)
    p = 1 / (1 + np.exp(-real))
    entropy = -t * np.log(p) - (1 - t) * np.log1p(-p)
    factor = np.where(positive, ALPHA * (1 - p) ** case.gamma, (1 - ALPHA) * p**case.gamma)
    slope = np.where(positive, -case.gamma * p, case.gamma * (1 - p))
    counts = (targets != -2)[:, None]
    gradient = np.zeros_like(x)
    gradient[:, : case.real] = counts * factor * (slope * entropy + p - t) * GRAD / POSITIVES
    return (counts * factor * entropy).sum() / POSITIVES, gradient[rows]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.dtype}-{c.rows}x{c.classes}")
def test_values(device, case):
    rng = np.random.default_rng(case.classes)
    encoded = encode(3 * rng.standard_normal((case.rows, case.classes)), case.dtype)
    targets = rng.integers(-2, case.real, case.rows)
    targets[:3] = (-2, -1, case.classes + 5)
    blocks, math = 2, DTYPES[case.math]
    loss, partials = device.put(np.full(1, 7, math)), device.put(np.full(blocks, 7, math))
    gradient = device.put(np.full(encoded.shape, encode(np.array(7.0), case.dtype)[()], encoded.dtype))
    common = dict(
        logits=device.put(encoded, case.offset * encoded.itemsize), rows=case.rows, classes=case.classes,
        targets=device.put(targets.astype(np.int64 if case.wide else np.int32)), real_classes=case.real,
        num_positives=device.put(np.full(1, POSITIVES, math)), grad_loss=device.put(np.full(1, GRAD, math)),
        partials=partials, alpha=ALPHA, gamma=case.gamma, smoothing=SMOOTHING, type=TYPE[case.dtype],
        wide_targets=case.wide, blocks=blocks, in_vectors=case.offset == 0,
    )  # fmt: skip
    threads = device.warp_size
    forward = make("FocalLoss", "focal_loss_arguments.h", result=loss, **common)
    device.launch(f"focal_loss_forward_{case.dtype}", blocks, threads, [forward])
    device.launch("focal_loss_finish" + "_f64" * (case.math == "f64"), 1, threads, [forward])
    backward = make("FocalLoss", "focal_loss_arguments.h", result=gradient, **common)
    device.launch(f"focal_loss_backward_{case.dtype}", blocks, threads, [backward])
    expected, wanted = oracle(decode(encoded, case.dtype), targets, case)
    work = ROUNDING[case.math]
    np.testing.assert_allclose(loss.numpy()[0], expected, rtol=64 * work)
    np.testing.assert_allclose(
        decode(gradient.numpy(), case.dtype),
        wanted,
        rtol=1.01 * ROUNDING[case.dtype] + 64 * work,
        atol=64 * work,
    )
