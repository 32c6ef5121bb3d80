"""multi_tensor_adam kernels against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from simt.element_types import ROUNDING, decode, encode
from simt.multi_tensor import THREADS, tensor_table
from simt.structs import make
from simt.tensor_lists import check_unscaled

PAIRS = [
    "f32_f32",
    "f16_f32",
    "bf16_f32",
    "f16_f16",
    "f32_f16",
    "bf16_bf16",
    "f32_bf16",
    "f64_f64",
    "f64_f64_f32",
]
MASTERS = ["f16_f16", "bf16_bf16", "f32_f16", "f32_bf16", "f32_f32"]  # gradient, model
SIZES = (1, 0, 7, 1000, 2048, 2503)
MISALIGNED = (0, 0, 0, 1, 0, 0)  # elements: the views of one tensor begin between two vectors
CHUNK = 1024
GRID = 3  # fewer blocks than chunks: each takes several
L2, DECOUPLED = 0, 1
LR, BETA1, BETA2, EPS, DECAY = 1e-2, 0.9, 0.999, 1e-8, 0.1


@dataclass
class State:
    """One optimizer's tensors on a device, and their values in float64."""

    device: object
    gradient: str
    parameter: str
    moment: str
    model: str | None = None
    lists: list = field(default_factory=list)
    types: list = field(default_factory=list)
    values: list = field(default_factory=list)

    def __post_init__(self):
        rng = np.random.default_rng(5)
        self.types = [self.gradient, self.parameter, self.moment, self.moment]
        scales = [1.0, 1.0, 0.1, 0.01]
        if self.model:
            self.types.append(self.model)
            scales.append(1.0)
        for k, (name, scale) in enumerate(zip(self.types, scales, strict=True)):
            arrays = [encode(scale * rng.standard_normal(n), name) for n in SIZES]
            if k == 3:
                arrays = [np.abs(a) for a in arrays]
            self.values.append([decode(a, name) for a in arrays])
            self.lists.append(
                [self.device.put(a, a.itemsize * skip) for a, skip in zip(arrays, MISALIGNED, strict=True)]
            )

    def now(self) -> list:
        """What the device holds, as float64."""
        return [
            [decode(b.numpy(), name) for b in buffers]
            for buffers, name in zip(self.lists, self.types, strict=True)
        ]

    def launch(self, kernel: str, **changes) -> None:
        """One step. Changed arguments may be buffers."""
        scalars = dict(lr=LR, beta1=BETA1, beta2=BETA2, eps=EPS, weight_decay=DECAY)
        values = dict(scalars, step=3, mode=DECOUPLED, bias_correction=1) | changes
        arguments = make("AdamArguments", "multi_tensor_adam.h", **values)
        table = tensor_table(self.device, self.lists, SIZES, CHUNK)
        self.device.launch(f"multi_tensor_adam_{kernel}", GRID, THREADS, [table, arguments])

    def expected(self, step=3, mode=DECOUPLED, bias_correction=True, lr=LR, inv_scale=1.0) -> list:
        """The step of the papers, in float64: parameter, exp_avg, exp_avg_sq of each tensor."""
        results = []
        for g, p, m, v in zip(*self.values[:4], strict=True):
            g = g * inv_scale + (DECAY * p if mode == L2 else 0)
            m = BETA1 * m + (1 - BETA1) * g
            v = BETA2 * v + (1 - BETA2) * g * g
            first, second = (1 - BETA1**step, 1 - BETA2**step) if bias_correction else (1, 1)
            keep = 1 - lr * DECAY if mode == DECOUPLED else 1
            results.append((p * keep - lr / first * m / (np.sqrt(v / second) + EPS), m, v))
        return results

    def check(self, **how) -> None:
        """Compares every list with expected()."""
        math = ROUNDING[self.moment]
        now = self.now()
        for tensor, expected in enumerate(self.expected(**how)):
            for k, reference in enumerate(expected, start=1):
                # The first term is what storing costs; the second what the arithmetic does, of terms near 1.
                rtol, atol = 1.01 * ROUNDING[self.types[k]] + 8 * math, 2 * math
                if self.types[k] == "f16":
                    atol += 2.0**-25  # half a step between subnormals
                np.testing.assert_allclose(now[k][tensor], reference, rtol=rtol, atol=atol)
            # Of positive terms alone: 1 - beta2 rounded to float would be 1.3e-5 off.
            np.testing.assert_allclose(now[3][tensor], expected[2], rtol=8 * math)
            if self.model:
                rounded = decode(encode(now[1][tensor], self.model), self.model)
                np.testing.assert_array_equal(now[4][tensor], rounded)

    def check_untouched(self) -> None:
        """Every list holds what it held."""
        for before, after in zip(self.values, self.now(), strict=True):
            for a, b in zip(before, after, strict=True):
                np.testing.assert_array_equal(a, b)


def _state(device, pair: str, master: bool = False) -> State:
    gradient, other, *moment = pair.split("_")
    moment = moment[0] if moment else "f64" if other == "f64" else "f32"
    return State(device, gradient, "f32" if master else other, moment, other if master else None)


@pytest.mark.parametrize("mode", [L2, DECOUPLED], ids=["l2", "decoupled"])
@pytest.mark.parametrize("pair", PAIRS)
def test_step(device, pair, mode):
    state = _state(device, pair)
    state.launch(pair, mode=mode)
    state.check(mode=mode)


@pytest.mark.parametrize("pair", MASTERS)
def test_step_with_a_model_copy(device, pair):
    state = _state(device, pair, master=True)
    state.launch(pair.replace("_", "_master_"))
    state.check()


def test_without_bias_correction(device):
    state = _state(device, "f32_f32")
    state.launch("f32_f32", bias_correction=0)
    state.check(bias_correction=False)


def test_values_that_lie_on_the_device(device):
    state = _state(device, "f16_f32")
    inv_scale, lr = device.put(np.array([0.5], np.float32)), device.put(np.array([0.25], np.float32))
    step, blocks_done = device.full(1, 6, np.int32), device.full(1, 0, np.uint32)
    state.launch(
        "f16_f32", lr=99.0, lr_on_device=lr, inv_scale=inv_scale, step=77, step_on_device=step,
        blocks_done=blocks_done, step_offset=1, advance_step=1,
    )  # fmt: skip
    state.check(step=7, lr=0.25, inv_scale=0.5)
    assert step.numpy()[0] == 7
    assert blocks_done.numpy()[0] == 0


@pytest.mark.parametrize("flag", ["found_inf", "noop_flag"])
def test_a_flagged_step_changes_nothing(device, flag):
    state = _state(device, "f32_f32")
    step, blocks_done = device.full(1, 6, np.int32), device.full(1, 0, np.uint32)
    raised = device.full(1, 1, np.float32 if flag == "found_inf" else np.int32)
    state.launch(
        "f32_f32",
        step_on_device=step,
        blocks_done=blocks_done,
        step_offset=1,
        advance_step=1,
        **{flag: raised},
    )
    state.check_untouched()
    assert step.numpy()[0] == 6


def test_a_tensor_without_gradient_is_left_out(device):
    state = _state(device, "f32_f32")
    out = SIZES.index(1000)
    state.lists[0][out], hidden = None, state.lists[0][out]
    state.launch("f32_f32")
    state.lists[0][out] = hidden
    now, expected = state.now(), state.expected()
    for k in range(1, 4):
        np.testing.assert_array_equal(now[k][out], state.values[k][out])
        np.testing.assert_allclose(now[k][out + 1], expected[out + 1][k - 1], rtol=1e-6, atol=2e-7)


# ---- the launch that leaves gradients unscaled ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "f64"])
def test_gradients_are_left_unscaled(device, name):
    check_unscaled(device, "multi_tensor_adam", "AdamArguments", name, 0.125)
