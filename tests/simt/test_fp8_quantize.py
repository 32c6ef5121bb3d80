"""The kernels of casts to FP8 against the formats' definition, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from fp8_formats import DTYPES as FORMATS
from fp8_formats import nearest_codes, values

from simt.element_types import decode, encode
from simt.structs import make
from simt.test_bias_activation import FORMS, FUNCTIONS, TYPE, f

THREADS, ROWS, LANES, SUMS_THREADS = 256, 128, 16, 256
SOURCE = {"input": 0, "activation": 1, "gradient": 2}


@dataclass(frozen=True)
class Case:
    """One tensor. `kernel` is the name's end, `width` its vectors; format: a number of fp8_formats.DTYPES."""

    kernel: str
    width: int
    type: str
    rows: int
    columns: int
    format: int = 0
    source: str = "input"
    form: str = "gelu"
    gated: bool = False
    by_row: bool = True
    by_column: bool = True
    sums: bool = True

    def __str__(self):
        which = f"{self.source}-{self.form}{'-gated' if self.gated else ''}" if self.source != "input" else ""
        return f"{self.kernel}-{self.type}-{self.rows}x{self.columns}-{self.format}-{which}"


CASES = [
    Case("bf16x8", 8, "bf16", 128, 128),
    Case("bf16x8", 8, "bf16", 144, 264, 1),
    Case("bf16x8", 8, "bf16", 5, 8, 2),
    Case("f16x8", 8, "f16", 130, 40, 3),
    Case("f16x8", 8, "f16", 32, 16, by_row=False, sums=False),
    Case("f32x4", 4, "f32", 48, 132, 1, by_column=False),
    Case("f32x4", 4, "f32", 300, 4),
    Case("any1", 1, "bf16", 129, 17, 2),
    Case("any1", 1, "f32", 3, 50, 3, sums=False),
    Case("any1", 1, "f16", 16, 1),
    Case("bf16x8", 8, "bf16", 20, 24, 1, "activation", sums=False),
    Case("f16x8", 8, "f16", 33, 16, 0, "activation", "silu", True, sums=False),
    Case("f32x4", 4, "f32", 12, 20, 1, "activation", "relu", True, sums=False),
    Case("any1", 1, "f32", 12, 7, 1, "activation", "squared_relu", sums=False),
    Case("bf16x8", 8, "bf16", 140, 24, 1, "gradient"),
    Case("f16x8", 8, "f16", 48, 136, 3, "gradient", "quick_gelu", True),
    Case("f32x4", 4, "f32", 12, 20, 1, "gradient", "relu", True),
    Case("any1", 1, "bf16", 17, 9, 0, "gradient", "silu", True),
]


class Made:
    """The case's tensors, and y in float64: what is cast."""

    def __init__(self, device, case: Case):
        rng = np.random.default_rng(case.columns)
        c, self.case, self.device = case, case, device
        halves = 2 if c.gated else 1
        spread = np.exp(rng.standard_normal((c.rows, c.columns)) * (2 if c.source == "input" else 0)).clip(
            0, 1e3
        )
        g = encode(rng.standard_normal((c.rows, c.columns)) * spread, c.type)
        u = encode(rng.standard_normal((c.rows, c.columns * halves)) * 2, c.type)
        if c.source == "input":
            g[0, 0] = encode(np.float32([np.nan]), c.type)[0]
        self.y = self.value(decode(g, c.type), decode(u, c.type))
        self.scale = np.float32(3.3)
        wide = self.y.shape[1]
        filled = device.put(np.full((c.rows, wide), 0x55, np.uint8)) if c.by_row else None
        turned = device.put(np.full((wide, c.rows), 0x55, np.uint8)) if c.by_column else None
        blocks = -(-c.rows // ROWS)
        self.buffers = {
            "input": device.put(u if c.source == "activation" else g),
            "before": device.put(u) if c.source == "gradient" else None,
            "scale": device.put(np.array([self.scale])),
            "amax": device.put(np.float32([1e-3])),
            "by_row": filled,
            "by_column": turned,
            "partials": device.put(np.full((blocks, wide), np.nan, np.float32)) if c.sums else None,
            "grad_bias": device.put(np.zeros(wide, g.dtype)) if c.sums else None,
        }

    def value(self, g, u):
        c = self.case
        if c.source == "input":
            return g
        first, second = (u[:, : c.columns], u[:, c.columns :]) if c.gated else (u, 1.0)
        y, slope = f(first, c.form)
        if c.source == "activation":
            return y * second
        return np.concatenate((g * second * slope, g * y), 1) if c.gated else g * slope

    def launch(self):
        c = self.case
        slope, cubic = FORMS[c.form]
        column_blocks = -(-c.columns // (LANES * c.width))
        arguments = make(
            "Fp8Quantize", "fp8_quantize.h", rows=c.rows, columns=c.columns, slope=slope, cubic=cubic,
            function=FUNCTIONS.get(c.form, 0), source=SOURCE[c.source], gated=c.gated, type=TYPE[c.type],
            format=c.format, wide_columns=c.rows % 16 == 0, column_blocks=column_blocks, **self.buffers,
        )  # fmt: skip
        name = f"fp8_quantize_{c.source}_{'gated_' if c.gated else ''}{c.kernel}"
        self.device.launch(name, column_blocks * -(-c.rows // ROWS), THREADS, [arguments])
        if c.sums:
            wide = self.y.shape[1]
            self.device.launch(
                "fp8_quantize_sums", -(-wide // (8 if wide < 8192 else 32)), SUMS_THREADS, [arguments]
            )


def check_codes(found, case, y, scale):
    """Exactly where y is the input; else within what float32 makes of an activation: a code beside it at most."""
    dtype = FORMATS[case.format]
    if case.source == "input":
        np.testing.assert_array_equal(found, nearest_codes(y.astype(np.float32) * scale, dtype))
        return
    margin = 1e-4 if case.type in ("f16", "bf16") else 2e-6
    scaled = y * float(scale)
    low = values(nearest_codes(scaled - np.abs(scaled) * margin - 1e-5, dtype), dtype)
    high = values(nearest_codes(scaled + np.abs(scaled) * margin + 1e-5, dtype), dtype)
    assert ((low <= values(found, dtype)) & (values(found, dtype) <= high)).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_quantize(device, case):
    made = Made(device, case)
    made.launch()
    buffers = made.buffers
    if case.by_row:
        check_codes(buffers["by_row"].numpy(), case, made.y, made.scale)
    if case.by_column:
        check_codes(buffers["by_column"].numpy().T, case, made.y, made.scale)
    largest = np.nanmax(np.abs(made.y))
    np.testing.assert_allclose(buffers["amax"].numpy(), largest, rtol=0 if case.source == "input" else 1e-4)
    if case.sums:
        y = made.y[:, 1:] if case.source == "input" else made.y  # the first column has a nan
        found = decode(buffers["grad_bias"].numpy(), case.type)[made.y.shape[1] - y.shape[1] :]
        size = np.abs(y).sum(0).max(initial=1.0)
        rounding = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-22}[case.type]
        np.testing.assert_allclose(found, y.sum(0), rtol=1.1 * rounding, atol=2e-6 * size)


@pytest.mark.parametrize("case", [CASES[i] for i in (1, 5, 9, 11, 14)], ids=str)
@pytest.mark.parametrize("power_of_two", [0, 1], ids=["any", "power"])
def test_own_scale(device, case, power_of_two):
    """The pass that makes a scale of the largest magnitude: it and 1 / it, once; its counters are 0 again."""
    made = Made(device, replace(case, by_row=False, by_column=False, sums=False))
    out, counters = (device.put(np.zeros(2, t)) for t in (np.float32, np.uint32))
    made.buffers |= dict(made_scale=out, scale_inv=device.put(np.zeros(1, np.float32)), counters=counters)
    made.buffers |= dict(amax=None, power_of_two=power_of_two, epsilon=1e-6)
    for _ in range(2):
        made.launch()
    amax, maximum = np.nanmax(np.abs(made.y)), values(np.arange(256, dtype=np.uint8), FORMATS[case.format])
    wanted = np.float32(np.nanmax(maximum[np.isfinite(maximum)])) / np.float32(amax)
    if power_of_two:
        wanted = 2.0 ** np.floor(np.log2(wanted))
    scale = out.numpy()[0]
    np.testing.assert_allclose(scale, wanted, rtol=0 if case.source == "input" or power_of_two else 1e-4)
    assert made.buffers["scale_inv"].numpy()[0] == np.float32(1) / scale and not counters.numpy().any()


@pytest.mark.parametrize("format", range(4), ids=[str(d)[14:] for d in FORMATS])
def test_every_bfloat16(device, format):
    """All 65,536 inputs."""
    bits = np.arange(65536, dtype=np.uint16).reshape(512, 128)
    out, columns = (device.put(np.zeros(s, np.uint8)) for s in ((512, 128), (128, 512)))
    arguments = make(
        "Fp8Quantize", "fp8_quantize.h", input=device.put(bits), scale=device.put(np.float32([1.0])), by_row=out,
        by_column=columns, rows=512, columns=128, type=TYPE["bf16"], format=format, wide_columns=1, column_blocks=1,
    )  # fmt: skip
    device.launch("fp8_quantize_input_bf16x8", 4, THREADS, [arguments])
    expected = nearest_codes(decode(bits, "bf16"), FORMATS[format])
    np.testing.assert_array_equal(out.numpy(), expected)
    np.testing.assert_array_equal(columns.numpy(), expected.T)


@pytest.mark.parametrize("old, new", [(0.0, 7.0), (7.0, 7.0), (9.0, 9.0)])
def test_amax_over_many_blocks(device, old, new):
    x = np.zeros((300, 260), np.float32)
    x[250, 200], x[3, 4] = -7.0, 6.0
    amax = device.put(np.float32([old]))
    arguments = make(
        "Fp8Quantize", "fp8_quantize.h", input=device.put(x), scale=device.put(np.float32([1.0])), amax=amax,
        by_row=device.put(np.zeros(x.shape, np.uint8)), rows=300, columns=260, type=0, column_blocks=5,
    )  # fmt: skip
    device.launch("fp8_quantize_input_f32x4", 15, THREADS, [arguments])
    assert amax.numpy() == new
