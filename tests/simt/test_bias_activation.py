"""The kernels of bias and activation against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from simt.element_types import DTYPES, ROUNDING, decode, encode
from simt.structs import make

TYPE = {"f32": 0, "f16": 1, "bf16": 2, "f64": 3}
THREADS, FINISH_THREADS = 128, 256
FEW_THREADS, FEW_COLUMNS = 512, 8  # of a block of the `few` kernels
GELU = 1.5957691216057308
FORMS = {
    "silu": (1.0, 0.0),
    "quick_gelu": (1.702, 0.0),
    "gelu": (GELU, GELU * 0.044715),
    "squared_relu": (0.0, 0.0),
    "relu": (0.0, 0.0),
    "sigmoid": (1.0, 0.0),
}
FUNCTIONS = {"sigmoid": 1, "squared_relu": 2, "relu": 3}  # 0: the others


@dataclass(frozen=True)
class Case:
    """One tensor. `kernel` is the name's end, `width` its vectors; parts: of the rows.

    lanes: vectors of a row that a block of the backward takes at most; threads: of such a block; last: the last part
    adds the bias's gradient up.
    """

    kernel: str
    width: int
    type: str
    rows: int
    hidden: int
    form: str = "silu"
    gated: bool = True
    bias: str | None = "f32"
    parts: int = 2
    scaled: bool = False
    lanes: int = THREADS
    threads: int = THREADS
    last: bool = False

    def __str__(self):
        end = "gated" if self.gated else "plain"
        end += "-scaled" if self.scaled else ""
        end += f"-{self.lanes}" if self.lanes < THREADS else ""
        return f"{self.kernel}-{self.type}-{self.rows}x{self.hidden}-{self.form}-{end}-{self.bias}"


CASES = [
    Case("bf16x8", 8, "bf16", 7, 24, bias="bf16"),
    Case("bf16x8", 8, "bf16", 3, 1032, parts=1),  # two blocks of columns
    Case("f16x8", 8, "f16", 40, 16, "gelu", bias="f16"),
    Case("f16x8", 8, "f16", 9, 40, "squared_relu", gated=False, parts=3),
    Case("f32x4", 4, "f32", 11, 20, "quick_gelu"),
    Case("f32x4", 4, "f32", 9, 12, "sigmoid", gated=False),
    Case("bf16x8", 8, "bf16", 9, 24, "relu", gated=False, bias="bf16"),
    Case("f16x8", 8, "f16", 5, 16, "sigmoid", gated=False, bias=None),
    Case("f64", 1, "f64", 4, 5, "relu", bias="f64"),
    Case("f64", 1, "f64", 4, 5, "sigmoid", bias=None),
    Case("f32x4", 4, "f32", 70, 8, gated=False, bias=None),
    Case("any1", 1, "bf16", 5, 7, bias="f16"),
    Case("any1", 1, "f32", 6, 131, "gelu", gated=False),
    Case("f64", 1, "f64", 5, 6, "gelu", bias="f64"),
    Case("f64", 1, "f64", 130, 3, gated=False, bias="f64", parts=1),
    Case("f32x4", 4, "f32", 300, 12, gated=False, parts=300),  # more than `finish` adds up at once
    Case("bf16x8", 8, "bf16", 4, 8200, gated=False, parts=3),  # so wide that its blocks take more columns
    Case("bf16x8", 8, "bf16", 11, 40, "relu", gated=False, bias="f32", scaled=True),
    Case("f16x8", 8, "f16", 9, 1032, "relu", gated=False, bias=None, parts=1, scaled=True),
    Case("f64", 1, "f64", 7, 5, "relu", gated=False, bias="f64", scaled=True),
    Case("any1", 1, "f16", 7, 9, "relu", gated=False, bias=None, scaled=True),
    # Small tensors: few columns a block, one part, or the last of several adds up; more than it adds up at once.
    Case("bf16x8", 8, "bf16", 130, 72, bias="bf16", parts=1, lanes=4, threads=256),
    Case("f16x8", 8, "f16", 141, 40, "gelu", gated=False, bias="f32", lanes=2, threads=256, last=True),
    Case("f32x4", 4, "f32", 150, 12, bias="f16", parts=11, lanes=2, threads=256, last=True),
    Case("any1", 1, "bf16", 37, 39, gated=False, bias="bf16", parts=3, lanes=32, threads=256, last=True),
    Case("f64", 1, "f64", 90, 11, "gelu", bias="f64", parts=9, lanes=4, threads=256, last=True),
]
# Fewer rows than a block has at once, as many, and more; columns past the end; two blocks of columns.
FEW_CASES = [
    Case("bf16x2", 2, "bf16", 37, 12, bias="bf16"),
    Case("bf16x2", 2, "bf16", 256, 8, "gelu", gated=False, bias="f32"),
    Case("f16x2", 2, "f16", 300, 6, "squared_relu", bias="f16"),
    Case("f16x2", 2, "f16", 129, 12, "relu", gated=False, bias="bf16", scaled=True),
    Case("f32x2", 2, "f32", 130, 10, "gelu"),
    Case("f32x2", 2, "f32", 5, 4, gated=False, bias="f32"),
]


def f(x, form):
    """The activation and its derivative, float64."""
    if form == "squared_relu":
        return np.maximum(x, 0) ** 2, 2 * np.maximum(x, 0)
    if form == "relu":
        return np.maximum(x, 0), (x > 0).astype(np.float64)
    slope, cubic = FORMS[form]
    if form == "sigmoid":
        s = 1 / (1 + np.exp(-x))
        return s, s * (1 - s)
    s = 1 / (1 + np.exp(-(slope * x + cubic * x**3)))
    return x * s, s + x * s * (1 - s) * (slope + 3 * cubic * x**2)


class Tensors:
    """The case's tensors on a device, and what must come of them."""

    def __init__(self, device, case: Case):
        rng = np.random.default_rng(case.hidden)
        self.columns = case.hidden * (2 if case.gated else 1)
        x, g = (
            encode(rng.standard_normal((case.rows, n)) * 2, case.type) for n in (self.columns, case.hidden)
        )
        bias = encode(rng.standard_normal(self.columns), case.bias) if case.bias else None
        u = decode(x, case.type) + (decode(bias, case.bias) if case.bias else 0)
        wide, (first, second) = decode(g, case.type), (u[:, : case.hidden], u[:, case.hidden :])
        y, slope = f(first, case.form)
        self.output = y * second if case.gated else y
        self.gradient = np.concatenate((wide * second * slope, wide * y), 1) if case.gated else wide * slope
        self.arrays = {
            "input": device.put(x),
            "grad_output": device.put(g),
            "bias": None if bias is None else device.put(bias),
        }
        self.lanes = case.hidden // case.width
        self.case, self.device = case, device

    def empty(self, shape, name):
        return self.device.put(np.full(shape, encode(np.array(7.0), name)[()], DTYPES[name]))

    def arguments(self, lane_threads, **more):
        c = self.case
        self.column_blocks = -(-self.lanes // lane_threads)
        slope, cubic = FORMS[c.form]
        return make(
            "BiasActivation", "bias_activation.h", rows=c.rows, hidden=c.hidden, slope=slope, cubic=cubic,
            function=FUNCTIONS.get(c.form, 0), gated=c.gated, type=TYPE[c.type], bias_type=TYPE[c.bias or c.type],
            lane_threads=lane_threads, column_blocks=self.column_blocks, parts=c.parts, **self.arrays, **more,
        )  # fmt: skip

    def launch(self, way, arguments, threads, shared=0):
        c = self.case
        name = f"bias_activation_{way}_{'gated_' if c.gated else ''}{c.kernel}"
        self.device.launch(name, self.column_blocks * c.parts, threads, [arguments], shared)


def near(found, name, expected, rows=1):
    work = ROUNDING["f64" if name == "f64" else "f32"]
    scale = np.abs(expected).max(initial=1.0)
    np.testing.assert_allclose(
        decode(found, name), expected, rtol=1.01 * ROUNDING[name] + 16 * work, atol=(16 + rows) * work * scale
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(device, case):
    t = Tensors(device, case)
    output = t.empty((case.rows, case.hidden), case.type)
    t.launch("forward", t.arguments(min(t.lanes, THREADS), output=output), THREADS)
    near(output.numpy(), case.type, t.output)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward(device, case):
    t = Tensors(device, case)
    gradient = t.empty((case.rows, t.columns), case.type)
    math = "f64" if case.type == "f64" else "f32"
    more = {}
    if case.bias:
        more = {
            "grad_bias": t.empty(t.columns, case.bias),
            "partials": t.empty((case.parts, t.columns), math),
        }
    counters = device.put(np.zeros(t.lanes, np.uint32)) if case.last else None
    scale = np.random.default_rng(1).standard_normal(t.columns) if case.scaled else 1.0
    if case.scaled:
        scale = encode(scale, case.bias or case.type)
        more |= {"scale": device.put(scale), "unscaled": t.empty(t.gradient.shape, case.type)}
    arguments = t.arguments(min(t.lanes, case.lanes), output=gradient, counters=counters, **more)
    shared = case.threads * case.width * (2 if case.gated else 1) * (8 if math == "f64" else 4)
    t.launch("backward", arguments, case.threads, shared)
    near(
        gradient.numpy(),
        case.type,
        t.gradient * (decode(scale, case.bias or case.type) if case.scaled else 1.0),
    )
    if case.scaled:
        near(more["unscaled"].numpy(), case.type, t.gradient)
    if case.last:
        assert not counters.numpy().any()
    if case.bias:
        finish = "bias_activation_finish" + ("_f64" if math == "f64" else "")
        if case.parts > 1 and not case.last:
            device.launch(
                finish, -(-t.columns // (8 if t.columns < 8192 else 32)), FINISH_THREADS, [arguments]
            )
        near(more["grad_bias"].numpy(), case.bias, t.gradient.sum(0), case.rows)


@pytest.mark.parametrize("case", [case for case in CASES if case.width > 1 and not case.scaled], ids=str)
def test_forward_of_few_rows(device, case):
    """A vector a thread, whatever the parts."""
    t = Tensors(device, case)
    output = t.empty((case.rows, case.hidden), case.type)
    share = 0 if t.lanes == 1 else -(-(2**32) // t.lanes)
    name = f"bias_activation_forward_few_{'gated_' if case.gated else ''}{case.kernel}"
    arguments = t.arguments(t.lanes, output=output, lane_share=share)
    device.launch(name, -(-case.rows * t.lanes // THREADS), THREADS, [arguments])
    near(output.numpy(), case.type, t.output)


@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_backward_of_few_rows(device, case):
    t = Tensors(device, case)
    gradient, grad_bias = t.empty((case.rows, t.columns), case.type), t.empty(t.columns, case.bias)
    more, scale = {}, 1.0
    if case.scaled:
        encoded = encode(np.random.default_rng(1).standard_normal(t.columns), case.bias)
        more = {"scale": device.put(encoded), "unscaled": t.empty(t.gradient.shape, case.type)}
        scale = decode(encoded, case.bias)
    arguments = t.arguments(1, output=gradient, grad_bias=grad_bias, **more)
    name = f"bias_activation_backward_few_{'gated_' if case.gated else ''}{case.kernel}"
    device.launch(name, -(-case.hidden // FEW_COLUMNS), FEW_THREADS, [arguments])
    near(gradient.numpy(), case.type, t.gradient * scale)
    near(grad_bias.numpy(), case.bias, t.gradient.sum(0), case.rows)
    if case.scaled:
        near(more["unscaled"].numpy(), case.type, t.gradient)
