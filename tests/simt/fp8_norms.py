"""Launches of the kernels of norms to FP8, and what they must give: for test_fp8_layer_norm and test_fp8_rms_norm."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from fp8_formats import DTYPES as FORMATS
from fp8_formats import nearest_codes, values

from simt import norms
from simt.norms import Case
from simt.structs import make

# (case, format, zero-centred gamma): rows of a warp, of a block, padded ones, long ones.
CASES = [
    (Case("bf16x2", 5, 72, warp_rows=1, stages=1), 0, 0),
    (Case("bf16x3", 7, 768, warp_rows=1, weight="f32", stages=3), 1, 1),
    (Case("f16x2", 5, 1000, input="f16", weight="f32", warps=4, stages=3), 2, 0),
    (Case("f32x4", 9, 36, input="f32", weight="f32", warp_rows=1, stages=3), 3, 1),
    (Case("f32x8", 3, 516, input="f32", weight="f32", stages=1), 0, 0),
    (Case("bf16x4", 3, 136, affine=False, warps=1), 0, 1),
    (Case("bf16x2", 7, 1024, threads=64, grid=1), 1, 0),
    (Case("long8", 3, 272, warps=1), 0, 1),
    (Case("long1", 5, 67, input="f16", weight="bf16"), 3, 0),
]
HELD = [  # less than a block's row and whole ones, of all of a block's threads; more rows than blocks, and fewer
    (Case("held_bf16", 7, 1096, warps=3), 0, 0),
    (Case("held_bf16", 5, 4096, threads=256), 1, 1),
    (Case("held_f16", 3, 8192, input="f16", weight="f16", threads=512, grid=3), 0, 1),
    (Case("held_f16", 2, 2048, input="f16", threads=128, affine=False), 1, 0),
]


def check(device, op: str, case: Case, format: int, zero_centered: int) -> None:
    """Codes between those of float64 a little to both sides, amax and statistics."""
    t = norms.Tensors(device, replace(case, output=case.input), "layer" in op)
    c, y = t.case, t.expected["output"]
    if zero_centered and c.affine:
        y = y + (y - (t.values["bias"] if t.centered else 0)) / t.values["weight"]
    out, amax = device.put(np.full((c.rows, c.hidden), 0x55, np.uint8)), device.put(np.float32([0.01]))
    mean, rstd = t.empty(c.rows, "f32"), t.empty(c.rows, "f32")
    more = {"mean": mean} if t.centered else {}
    constants = 2 if t.centered else 1
    arguments = make(
        "NormForward", "norm_arguments.h", input=t.put("input", c.input), output=out, rstd=rstd,
        constant_bytes=t.constant_bytes(constants), **t.weights(), **more, **t.common(),
    )  # fmt: skip
    codes = make(
        "Fp8Norm", "norm_codes.h", scale=device.put(np.float32([1.3])), amax=amax, format=format,
        zero_centered_gamma=zero_centered,
    )  # fmt: skip
    shared = 0 if c.held else t.constant_bytes(constants) + t.stage_bytes(1)
    device.launch(f"{op}_forward_{c.kernel}", c.grid, t.block, [arguments, codes], shared=shared)
    margin = np.abs(y) * 1e-4 + 1e-5
    dtype = FORMATS[format]
    low, high = (values(nearest_codes((y + m) * np.float32(1.3), dtype), dtype) for m in (-margin, margin))
    found = values(out.numpy(), dtype)
    assert ((low <= found) & (found <= high)).all()
    np.testing.assert_allclose(amax.numpy(), np.abs(y).max(), rtol=1e-4)
    norms.near(rstd.numpy(), "f32", t.expected["rstd"])
    if t.centered:
        norms.near(mean.numpy(), "f32", t.expected["mean"])
