"""multi_tensor_lamb kernels against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import numpy as np
import pytest

from simt.element_types import ROUNDING, decode, encode
from simt.multi_tensor import THREADS, reduction_scratch, tensor_table
from simt.structs import make

TYPES = [
    ("f32", "f32", "f32"),
    ("f16", "f32", "f32"),
    ("bf16", "f32", "f32"),
    ("f16", "f16", "f32"),
    ("f16", "f16", "f16"),
    ("bf16", "bf16", "f32"),
    ("bf16", "bf16", "bf16"),
    ("f32", "f16", "f32"),
    ("f32", "bf16", "f32"),
    ("f64", "f64", "f64"),
]
MODELS = [("f16", "f16"), ("bf16", "bf16"), ("f32", "f16"), ("f32", "bf16")]  # gradient, model copy
SIZES = (1, 0, 7, 1000, 2048, 2503)
MISALIGNED = (0, 0, 0, 1, 0, 0)
CHUNK, GRID = 1024, 3
LR, BETA1, BETA2, EPS, DECAY, STEP = 1e-2, 0.9, 0.999, 1e-6, 0.1, 3
L2, DECOUPLED = 0, 1
DEFAULTS = dict(
    lr=LR, beta1=BETA1, beta2=BETA2, eps=EPS, weight_decay=DECAY, step=STEP, mode=DECOUPLED,
    bias_correction=1, grad_averaging=1,
)  # fmt: skip


class Lamb:
    """Gradients, parameters, moments and perhaps model copies on a device, with their values in float64."""

    def __init__(self, device, gradient, parameter, moment, model=None):
        rng = np.random.default_rng(3)
        self.device, self.types = device, [gradient, parameter, moment, moment]
        scales = [1.0, 1.0, 0.1, 0.01]
        if model:
            self.types.append(model)
            scales.append(1.0)
        self.name = "_".join([gradient, parameter, moment, *([model] if model else [])])
        self.values, self.lists = [], []
        for k, (name, scale) in enumerate(zip(self.types, scales, strict=True)):
            draws = [scale * rng.standard_normal(n) for n in SIZES]
            arrays = [encode(np.abs(x) if k == 3 else x, name) for x in draws]
            self.values.append([decode(a, name) for a in arrays])
            skips = zip(arrays, MISALIGNED, strict=True)
            self.lists.append([device.put(a, a.itemsize * skip) for a, skip in skips])

    def now(self):
        return [
            [decode(b.numpy(), name) for b in buffers]
            for buffers, name in zip(self.lists, self.types, strict=True)
        ]

    def step(self, run=1, **changes):
        arguments = DEFAULTS | changes
        table = tensor_table(self.device, self.lists, list(SIZES), CHUNK)
        scratch, done = reduction_scratch(self.device, table, reductions=2, run=run)
        first = make("LambArguments", "multi_tensor_lamb.h", **arguments)
        kernel = f"multi_tensor_lamb_moments_{self.name}"
        self.device.launch(kernel, GRID, THREADS, [table, first, scratch])
        assert not done.numpy().any()
        second = make(
            "LambArguments", "multi_tensor_lamb.h", **arguments, totals=scratch.totals, tensors=table.tensors
        )
        self.device.launch(f"multi_tensor_lamb_apply_{self.name}", GRID, THREADS, [table, second])


def expected(
    values, *, mode=DECOUPLED, decay=DECAY, clip=1.0, nvlamb=0, correct=1, average=1, step=STEP, limit=np.inf
):
    """(updates, parameters, exp_avgs, exp_avg_sqs) by You et al. 2019, algorithm 2, in float64."""
    results = []
    for g, p, m, v in zip(*values[:4], strict=True):
        g = g * clip + (decay * p if mode == L2 else 0)
        m = BETA1 * m + (1 - BETA1 if average else 1) * g
        v = BETA2 * v + (1 - BETA2) * g * g
        c1, c2 = (1 - BETA1**step, 1 - BETA2**step) if correct else (1, 1)
        u = (m / c1) / (np.sqrt(v / c2) + EPS) + (decay * p if mode == DECOUPLED else 0)
        norms = min(np.linalg.norm(p), limit), np.linalg.norm(u)
        scaled = (nvlamb or decay != 0) and all(norms)
        results.append((u, p - LR * (norms[0] / norms[1] if scaled else 1) * u, m, v))
    return [list(column) for column in zip(*results, strict=True)]


def check(lamb, wanted):
    for name, got, want in zip(lamb.types, lamb.now(), wanted, strict=False):
        for a, b in zip(got, want, strict=True):
            # Rounding of the stored type, or of float32 arithmetic; and of the update, which waits in the
            # gradient's type for the second launch and moves a parameter by a tenth of itself at most.
            tolerance = max(ROUNDING[name], 0.1 * ROUNDING[lamb.types[0]], 3e-6)
            if lamb.name == "f64_f64_f64":
                tolerance = 1e-12
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("types", TYPES, ids="_".join)
def test_every_type(device, types):
    lamb = Lamb(device, *types)
    lamb.step()
    check(lamb, expected(lamb.values))


@pytest.mark.parametrize("types", MODELS, ids="_".join)
def test_model_copies_are_the_rounded_masters(device, types):
    gradient, model = types
    lamb = Lamb(device, gradient, "f32", "f32", model)
    lamb.step()
    check(lamb, expected(lamb.values))
    for master, copy in zip(lamb.lists[1], lamb.lists[4], strict=True):
        np.testing.assert_array_equal(copy.numpy(), encode(master.numpy(), model))


@pytest.mark.parametrize(
    ("arguments", "formula"),
    [
        (dict(mode=L2), dict(mode=L2)),
        (dict(weight_decay=0.0), dict(decay=0.0)),
        (dict(weight_decay=0.0, use_nvlamb=1), dict(decay=0.0, nvlamb=1)),
        (dict(bias_correction=0, grad_averaging=0), dict(correct=0, average=0)),
        (dict(max_param_norm=10.0), dict(limit=10.0)),
    ],
    ids=["l2", "no decay", "nvlamb", "no correction", "largest norm"],
)
def test_options(device, arguments, formula):
    lamb = Lamb(device, "f32", "f32", "f32")
    lamb.step(run=2, **arguments)
    check(lamb, expected(lamb.values, **formula))


@pytest.mark.parametrize(("norm", "limit", "clip"), [(8.0, 2.0, 0.25), (1.0, 2.0, 1.0), (8.0, 0.0, 1.0)])
def test_clips_by_the_global_norm(device, norm, limit, clip):
    lamb = Lamb(device, "f32", "f32", "f32")
    lamb.step(global_grad_norm=device.full(1, norm), max_grad_norm=limit)
    check(lamb, expected(lamb.values, clip=clip))


def test_scalars_on_the_device(device):
    lamb = Lamb(device, "f32", "f32", "f32")
    step = device.full(1, STEP - 1, np.int32)
    lamb.step(
        lr=0.0, lr_on_device=device.full(1, LR), step=0, step_on_device=step, step_offset=1, advance_step=1,
        inv_scale=device.full(1, 0.5), global_grad_norm=device.full(1, 4.0),
        max_grad_norm_on_device=device.full(1, 2.0), found_inf=device.full(1, 0.0),
    )  # fmt: skip
    check(lamb, expected(lamb.values, clip=0.25))
    assert step.numpy()[0] == STEP


def test_an_overflow_leaves_everything_as_it_is(device):
    lamb = Lamb(device, "f32", "f32", "f32")
    step = device.full(1, 2, np.int32)
    before = lamb.now()
    lamb.step(found_inf=device.full(1, 1.0), step_on_device=step, step_offset=1, advance_step=1)
    for old, new in zip(before, lamb.now(), strict=True):
        for a, b in zip(old, new, strict=True):
            np.testing.assert_array_equal(a, b)
    assert step.numpy()[0] == 2


# ---- the two halves, as public apex splits them --------------------------------------------------------


def launch_stage1(halves, name, arguments, run=1):
    table = tensor_table(halves.device, halves.lists, list(SIZES), CHUNK)
    scratch, done = reduction_scratch(halves.device, table, reductions=2, run=run)
    halves.device.launch(f"multi_tensor_lamb_stage1_{name}", GRID, THREADS, [table, arguments, scratch])
    assert not done.numpy().any()


@pytest.mark.parametrize(
    ("types", "name"),
    [
        (("f32", "f32", "f32", "f32", "f32"), "f32_f32_f32"),
        (("f16", "f32", "f32", "f32", "f16"), "f16_f32_f16"),
        (("bf16", "bf16", "bf16", "bf16", "f32"), "bf16_bf16_f32"),
    ],
)
@pytest.mark.parametrize("run", [1, 2])
def test_stage1(device, types, name, run):
    halves = Lamb(device, *types[:3], model=types[4])  # the fifth list receives the updates
    decays = np.linspace(0.0, 0.5, len(SIZES)).astype(np.float32)
    norms = [device.full(len(SIZES), np.nan) for _ in range(2)]
    arguments = make(
        "LambArguments", "multi_tensor_lamb.h", **(DEFAULTS | dict(weight_decay=0.0)),
        global_grad_norm=device.full(1, 8.0), max_grad_norm=2.0, per_tensor_decay=device.put(decays),
        parameter_norms=norms[0], update_norms=norms[1],
    )  # fmt: skip
    launch_stage1(halves, name, arguments, run)
    updates, _, averages, squares = expected(halves.values, clip=0.25, decay=0.0)
    updates = [u + d * p for u, d, p in zip(updates, decays, halves.values[1], strict=True)]
    for buffer, tensors in zip(norms, (halves.values[1], updates), strict=True):
        np.testing.assert_allclose(buffer.numpy(), [np.linalg.norm(x) for x in tensors], rtol=3e-6, atol=3e-6)
    for k, wanted in ((2, averages), (3, squares), (4, updates)):
        tolerance = max(ROUNDING[types[k]], 3e-6)
        for a, b in zip(halves.now()[k], wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("parameter", "update"), [("f32", "f32"), ("f32", "f16"), ("bf16", "f32"), ("f16", "f16")]
)
def test_stage2(device, parameter, update):
    halves = Lamb(device, parameter, update, "f32")  # of these lists, the first two
    rng = np.random.default_rng(9)
    norms = [rng.uniform(1, 2, len(SIZES)).astype(np.float32) for _ in range(2)]
    norms[0][0] = norms[1][2] = 0  # such a tensor moves by lr alone
    arguments = make(
        "LambStage2Arguments", "multi_tensor_lamb_stage2.h", lr=LR, scaled=1,
        parameter_norms=device.put(norms[0]), update_norms=device.put(norms[1]),
    )  # fmt: skip
    table = tensor_table(device, halves.lists[:2], list(SIZES), CHUNK)
    device.launch(f"multi_tensor_lamb_stage2_{parameter}_{update}", GRID, THREADS, [table, arguments])
    for i, (p, u) in enumerate(zip(*halves.values[:2], strict=True)):
        ratio = norms[0][i] / norms[1][i] if norms[0][i] and norms[1][i] else 1.0
        tolerance = max(ROUNDING[parameter], 1e-6)
        np.testing.assert_allclose(halves.now()[0][i], p - LR * ratio * u, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mode", [L2, DECOUPLED])
def test_stage1_with_scalars_of_each_tensor(device, mode):
    halves, count = Lamb(device, "f32", "f32", "f32", model="f32"), len(SIZES)
    own = dict(beta1=0.5, beta2=0.75, gradient_share=0.25, eps=1e-3)
    own = {name: [v * (1 + k % 3 / 8) for k in range(count)] for name, v in own.items()}
    own |= dict(bias_correction=[float(k % 2) for k in range(count)], decay=[k / 8 for k in range(count)])
    arguments = make(
        "LambArguments", "multi_tensor_lamb.h", mode=mode, step=99, step_on_device=device.full(1, STEP, np.int32),
        inv_scale=device.full(1, 0.5),
        **{f"per_tensor_{name}": device.put(np.array(v, np.float32)) for name, v in own.items()},
    )  # fmt: skip
    launch_stage1(halves, "f32_f32_f32", arguments)
    now = halves.now()
    for k, (g, p, m, v) in enumerate(zip(*halves.values[:4], strict=True)):
        s = {name: values[k] for name, values in own.items()}
        g = g * 0.5 + (s["decay"] * p if mode == L2 else 0)
        m = s["beta1"] * m + s["gradient_share"] * g
        v = s["beta2"] * v + (1 - s["beta2"]) * g * g
        c1, c2 = (1 - s["beta1"] ** STEP, 1 - s["beta2"] ** STEP) if s["bias_correction"] else (1, 1)
        u = (m / c1) / (np.sqrt(v / c2) + s["eps"]) + (s["decay"] * p if mode == DECOUPLED else 0)
        for place, wanted in ((2, m), (3, v), (4, u)):
            np.testing.assert_allclose(now[place][k], wanted, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("nvlamb", [0, 1])
@pytest.mark.parametrize("model", ["f16", "bf16"])
def test_stage2_with_decays_and_copies(device, model, nvlamb):
    halves, count = Lamb(device, "f32", "f32", model), len(SIZES)  # of these lists, the first three
    norms = [np.full(count, n, np.float32) for n in (6.0, 3.0)]
    decays = np.array([k % 2 / 8 for k in range(count)], np.float32)
    table = tensor_table(device, halves.lists[:3], list(SIZES), CHUNK)
    for skipped in (dict(found_inf=device.full(1, 1.0)), dict(noop_flag=device.full(1, 1, np.int32)), {}):
        arguments = make(
            "LambStage2Arguments", "multi_tensor_lamb_stage2.h", use_nvlamb=nvlamb, lr_on_device=device.full(1, LR),
            parameter_norms=device.put(norms[0]), update_norms=device.put(norms[1]),
            per_tensor_decay=device.put(decays), **skipped,
        )  # fmt: skip
        device.launch(f"multi_tensor_lamb_stage2_f32_f32_{model}", GRID, THREADS, [table, arguments])
        now = halves.now()
        for k, (p, u) in enumerate(zip(*halves.values[:2], strict=True)):
            if skipped:
                np.testing.assert_array_equal(now[0][k], p)
                np.testing.assert_array_equal(now[2][k], halves.values[2][k])
                continue
            step = LR * (2.0 if nvlamb or decays[k] else 1.0)
            np.testing.assert_allclose(now[0][k], p - step * u, rtol=1e-6, atol=1e-6)
            np.testing.assert_array_equal(now[2][k], decode(encode(now[0][k], model), model))
