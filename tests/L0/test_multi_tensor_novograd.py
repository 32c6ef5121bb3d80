"""multi_tensor_novograd against float64, by every entrance and on everything that can serve it.

Tolerance: one rounding to each output's dtype, eight of the arithmetic's, and a little of the terms' size
(they are near 1), because sums may cancel. Norms: float32, whose sums of squares are rounded a few times
more.
"""

from __future__ import annotations

import lists
import pytest
import torch
from lists import BF16, F16, F32, F64, flag, scalar

from apex._loader import bindings

INSIDE, DECOUPLED = 0, 1
# gradient, parameter, average
PAIRS = [(F32, F32), (F16, F32), (BF16, F32), (F16, F16), (F32, F16), (BF16, BF16), (F32, BF16), (F64, F64)]
DTYPES = [(*pair, F64 if pair[1] == F64 else F32) for pair in PAIRS] + [(F16,) * 3, (BF16,) * 3]
SCALARS = dict(
    lr=0.1, beta1=0.9, beta2=0.98, eps=1e-6, step=3, bias_correction=True, weight_decay=0.3,
    grad_averaging=True, moment_mode=INSIDE, norm_type=2,
)  # fmt: skip


def dispatcher(tensors, norms, **options):
    torch.ops.apex.multi_tensor_novograd(*tensors, norms, **options)


def direct(tensors, norms, **options):
    module = bindings.load().module
    if module is None:
        pytest.skip(f"no bindings: {bindings.load().reason}")
    module.multi_tensor_novograd(tensors, norms, **options)


@pytest.fixture(params=[dispatcher, direct], ids=lambda f: f.__name__)
def multi_tensor_novograd(request):
    bindings.load()
    return request.param


def state(device, dtypes=(F32, F32, F32), shapes=lists.FEW):
    """[gradients, parameters, averages] in the middle of a training run."""
    return [lists.random(dtype, device, shapes, seed=k) for k, dtype in enumerate(dtypes)]


def some_norms(tensors):
    """Averaged norms; one of them says that there is none yet."""
    count = len(tensors[0])
    return (
        torch.linspace(-1.0, 3.0, count, device=tensors[0][0].device, dtype=F32)
        if count
        else torch.empty(0, dtype=F32, device="cpu")
    )


def expected(tensors, norms, inv_scale=1.0, **changes):
    """[parameters, averages], norms after the step, in float64."""
    s = SCALARS | changes
    first = 1 - s["beta1"] ** s["step"] if s["bias_correction"] else 1
    second = (1 - s["beta2"] ** s["step"]) ** 0.5 if s["bias_correction"] else 1
    parameters, averages, new = [], [], []
    for g, p, m, old in zip(*map(lists.exact, tensors), norms.double().tolist(), strict=True):
        g = g * inv_scale
        norm = float(g.abs().max()) if s["norm_type"] == 0 and g.numel() else float(g.square().sum()) ** 0.5
        if not g.numel():
            new.append(old)
        elif old < 0:
            new.append(norm)
        elif s["norm_type"] == 0:
            new.append(s["beta2"] * old + (1 - s["beta2"]) * norm)
        else:
            new.append((s["beta2"] * old**2 + (1 - s["beta2"]) * norm**2) ** 0.5)
        divisor = new[-1] / second + s["eps"]
        if s["moment_mode"] == INSIDE:
            g = g / divisor + s["weight_decay"] * p
        averages.append(s["beta1"] * m + (1 - s["beta1"] if s["grad_averaging"] else 1) * g)
        update = averages[-1] / first
        if s["moment_mode"] == DECOUPLED:
            update = update / divisor + s["weight_decay"] * p
        parameters.append(p - s["lr"] * update)
    return (parameters, averages), torch.tensor(new, dtype=F64, device="cpu")


def run(op, tensors, inv_scale=1.0, wanted=None, norm_roundings=8, **options):
    """One step, compared. wanted: what the oracle is told beside the options."""
    norms = some_norms(tensors)
    values, new = expected(tensors, norms, inv_scale, **(options | (wanted or {})))
    gradients = lists.clones(tensors[0])
    op(tensors, norms, **(SCALARS | options))
    lists.assert_same_bits(tensors[0], gradients)
    lists.assert_near([norms], [new], arithmetic=norm_roundings)
    for found, value in zip(tensors[1:], values, strict=True):
        working = lists.ROUNDING[F32]  # the norms' own, also of float64 tensors
        lists.assert_near(found, value, arithmetic=norm_roundings, smallest=2 * norm_roundings * working)


def launches(variant):
    return sum(n for name, n in variant.kernels.items() if "novograd" in name)


@pytest.mark.parametrize("moment_mode", [INSIDE, DECOUPLED], ids=["inside", "decoupled"])
@pytest.mark.parametrize("norm_type", [0, 2])
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda dtypes: "-".join(str(d)[6:] for d in dtypes))
def test_values(variant, multi_tensor_novograd, dtypes, norm_type, moment_mode):
    how = dict(norm_type=norm_type, moment_mode=moment_mode)
    run(multi_tensor_novograd, state(variant.device, dtypes), **how)
    if variant.simt:
        assert launches(variant) == 2


def test_large_tensors(variant):
    """Sums of many squares in float32: the reference's, torch's own norm, is off by 34 roundings here."""
    roundings = 48 if variant.name == "reference" else 24
    run(dispatcher, state(variant.device, (BF16, F32, F32), lists.SHAPES), norm_roundings=roundings)


@pytest.mark.parametrize("moment_mode", [INSIDE, DECOUPLED], ids=["inside", "decoupled"])
@pytest.mark.parametrize(
    "options",
    [
        dict(weight_decay=0.0),
        dict(eps=0.5),
        dict(lr=0.0),
        dict(bias_correction=False, step=0),
        dict(grad_averaging=False),
        dict(step=100_000),
        dict(beta1=0.0, beta2=0.0),
    ],
    ids=str,
)
def test_options(variant, options, moment_mode):
    run(dispatcher, state(variant.device), moment_mode=moment_mode, **options)


def test_misaligned_views(variant, multi_tensor_novograd):
    for k in range(3):
        tensors = state(variant.device)
        tensors[k] = lists.misaligned(tensors[k])
        run(multi_tensor_novograd, tensors)


def test_memory_orders(variant, multi_tensor_novograd):
    """Gradients may have other strides than their parameters."""
    tensors = [lists.channels_last(F32, variant.device, seed=10 * k) for k in range(3)]
    run(multi_tensor_novograd, tensors)
    run(multi_tensor_novograd, [[g.contiguous() for g in tensors[0]], *tensors[1:]])


@pytest.mark.parametrize("sorted_by_dtype", [True, False])
def test_mixed_dtypes_in_one_call(variant, multi_tensor_novograd, sorted_by_dtype):
    """Norms of a launch lie side by side, or here and there."""
    columns = [[], [], []]
    for turn in range(1 if sorted_by_dtype else 2):
        for dtypes in DTYPES:
            new = state(variant.device, dtypes, ((5,), (3, 0), (130 + turn,)))
            for column, tensors in zip(columns, new, strict=True):
                column += tensors
    run(multi_tensor_novograd, columns)
    if variant.simt:
        assert launches(variant) == 2 * len(DTYPES)


def test_norms_as_they_are(variant, multi_tensor_novograd):
    """For gradients of which this process holds a part: the caller averaged the norms of the whole."""
    tensors = state(variant.device)
    norms = torch.rand(len(tensors[0]), device=variant.device, dtype=F32) + 0.5
    before = norms.clone()
    first, second = 1 - 0.9**3, (1 - 0.98**3) ** 0.5
    values = [[], []]
    for g, p, m, norm in zip(*map(lists.exact, tensors), norms.double().tolist(), strict=True):
        g = g / (norm / second + 1e-6) + 0.3 * p
        values[1].append(0.9 * m + 0.1 * g)
        values[0].append(p - 0.1 * values[1][-1] / first)
    multi_tensor_novograd(tensors, norms, **(SCALARS | dict(update_norms=False)))
    lists.assert_same_bits([norms], [before])
    for found, value in zip(tensors[1:], values, strict=True):
        lists.assert_near(found, value, arithmetic=8, smallest=16 * lists.ROUNDING[F32])


def test_scalars_on_the_device(variant, multi_tensor_novograd):
    """Also the step, which the last launch of the call counts."""
    device = variant.device
    step = scalar(6, device, torch.int32)
    options = dict(lr_tensor=scalar(0.25, device), inv_scale=scalar(0.125, device), step_tensor=step)
    columns = [[], [], []]
    for dtypes in ((F16, F32, F32), (F32, F32, F32)):
        for column, tensors in zip(columns, state(device, dtypes), strict=True):
            column += tensors
    norms = some_norms(columns)
    values, new = expected(columns, norms, 0.125, lr=0.25, step=7)
    multi_tensor_novograd(columns, norms, **(SCALARS | options | dict(lr=99.0, step=0, advance_step=True)))
    assert step.item() == 7
    lists.assert_near([norms], [new], arithmetic=8)
    for found, value in zip(columns[1:], values, strict=True):
        lists.assert_near(found, value, arithmetic=8, smallest=16 * lists.ROUNDING[F32])
    multi_tensor_novograd(columns, norms, **(SCALARS | options | dict(step=0)))
    assert step.item() == 7


@pytest.mark.parametrize("what", ["found_inf", "noop_flag"])
def test_a_flagged_step_changes_nothing(variant, multi_tensor_novograd, what):
    raised = scalar(1.0, variant.device) if what == "found_inf" else flag(variant.device, 1)
    down = scalar(0.0, variant.device) if what == "found_inf" else flag(variant.device)
    tensors, step = state(variant.device), scalar(6, variant.device, torch.int32)
    norms = some_norms(tensors)
    columns = [*tensors, [norms]]
    before = [lists.clones(column) for column in columns]
    counted = dict(step_tensor=step, advance_step=True)
    multi_tensor_novograd(tensors, norms, **(SCALARS | counted | {what: raised}))
    for column, old in zip(columns, before, strict=True):
        lists.assert_same_bits(column, old)
    assert step.item() == 6
    run(multi_tensor_novograd, tensors, **{what: down})


def test_an_overflow_is_passed_on(variant, multi_tensor_novograd):
    """As public apex: without a flag the norm of an inf is inf, and stays so."""
    tensors = state(variant.device, shapes=((5,), (9,)))
    tensors[0][1][3] = float("inf")
    norms = torch.ones(2, device=variant.device, dtype=F32)
    multi_tensor_novograd(tensors, norms, **SCALARS)
    assert norms[0].isfinite() and norms[1].isinf()
    assert tensors[1][0].isfinite().all()


def test_bad_input_raises_before_anything_runs(variant, multi_tensor_novograd):
    if not bindings.load().native:
        pytest.skip(f"the reference alone does not check its input: {bindings.load().reason}")
    tensors = state(variant.device)
    norms = some_norms(tensors)
    before = [lists.clones(column) for column in [*tensors, [norms]]]
    doubles = [[t.double() for t in tensors[0]], *tensors[1:]]
    cases = [
        (ValueError, "betas must lie", tensors, norms, {"beta2": 1.0}),
        (ValueError, "moment_mode is 0", tensors, norms, {"moment_mode": 2}),
        (ValueError, "norm_type is 2", tensors, norms, {"norm_type": 1}),
        (ValueError, "step counts from 1", tensors, norms, {"step": 0}),
        (ValueError, "advances the step", tensors, norms, {"advance_step": True, "update_norms": False}),
        (TypeError, "no variant takes", doubles, norms, {}),
        (TypeError, "grad_norms must be a float32", tensors, norms.double(), {}),
        (ValueError, "grad_norms holds 2 elements for 5", tensors, norms[:2], {}),
    ]
    for error, words, columns, numbers, changes in cases:
        with pytest.raises(error, match=words):
            multi_tensor_novograd(columns, numbers, **(SCALARS | changes))
    for column, old in zip([*tensors, [norms]], before, strict=True):
        lists.assert_same_bits(column, old)


def test_opcheck():
    bindings.load()
    tensors = state("cpu", (BF16, F32, F32), ((3,), (2, 5)))
    counted = dict(step_tensor=scalar(1, "cpu", torch.int32), advance_step=True, noop_flag=flag("cpu"))
    torch.library.opcheck(
        torch.ops.apex.multi_tensor_novograd.default,
        (*tensors, torch.ones(2, dtype=F32, device="cpu")),
        SCALARS | counted,
    )
