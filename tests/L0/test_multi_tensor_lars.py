"""multi_tensor_lars against float64, by every entrance and on everything that can serve it.

Tolerance: one rounding to each output's dtype, sixteen of the arithmetic's (norms are sums of many squares),
and a little of the terms' size (they are near 1), because sums may cancel.
"""

from __future__ import annotations

import lists
import pytest
import torch
from lists import BF16, F16, F32, F64, flag, scalar

from apex._loader import bindings

# gradient, parameter, momentum buffer[, model copy]
PAIRS = [(F32, F32), (F16, F32), (BF16, F32), (F16, F16), (F32, F16), (BF16, BF16), (F32, BF16), (F64, F64)]
ROUNDED = [(F16, F16, F16), (F32, F16, F16), (BF16, BF16, BF16), (F32, BF16, BF16)]
DTYPES = [(*pair, F64 if pair[1] == F64 else F32) for pair in PAIRS] + ROUNDED
MODEL = [
    (F16, F32, F32, F16),
    (F32, F32, F32, F16),
    (BF16, F32, F32, BF16),
    (F32, F32, F32, BF16),
    (BF16, F32, F32, F16),
]
SCALARS = dict(
    lr=2.0, trust_coefficient=0.1, eps=0.01, weight_decay=0.3, momentum=0.9, nesterov=False, is_skipped=False,
    scale=0.5,
)  # fmt: skip


def dispatcher(tensors, **options):
    torch.ops.apex.multi_tensor_lars(*tensors, *[[]] * (4 - len(tensors)), **options)


def direct(tensors, **options):
    module = bindings.load().module
    if module is None:
        pytest.skip(f"no bindings: {bindings.load().reason}")
    module.multi_tensor_lars(tensors, **options)


@pytest.fixture(params=[dispatcher, direct], ids=lambda f: f.__name__)
def multi_tensor_lars(request):
    bindings.load()
    return request.param


def state(device, dtypes=(F32, F32, F32), shapes=lists.FEW):
    """[gradients, parameters, buffers[, model copies]] in the middle of a training run."""
    found = [lists.random(dtype, device, shapes, seed=k) for k, dtype in enumerate(dtypes[:3])]
    if len(dtypes) > 3:
        found.append([p.to(dtypes[3]) for p in found[1]])
    return found


def expected(tensors, inv_scale=1.0, **changes):
    """[parameters, buffers] after public apex's step, in float64."""
    s = SCALARS | changes
    parameters, buffers = [], []
    for i, (g, p, m) in enumerate(zip(*map(lists.exact, tensors[:3]), strict=True)):
        g, size = g * s["scale"] * inv_scale, s["lr"]
        g_norm, p_norm = float(g.norm()), float(p.norm())
        if "grad_norms" in s:
            g_norm, p_norm = (float(s[name][i]) for name in ("grad_norms", "param_norms"))
        if not s["is_skipped"] and g_norm > 0 and p_norm > 0:
            size *= s["trust_coefficient"] * p_norm / (g_norm + s["weight_decay"] * p_norm + s["eps"])
        step = size * (g + s["weight_decay"] * p)
        buffers.append(s["momentum"] * m - step)
        parameters.append(p + (s["momentum"] * buffers[-1] - step if s["nesterov"] else buffers[-1]))
    return parameters, buffers


def run(op, tensors, inv_scale=1.0, wanted=None, roundings=16, **options):
    """One step, compared. wanted: what the oracle is told beside the options."""
    values = expected(tensors, inv_scale, **(options | (wanted or {})))
    gradients = lists.clones(tensors[0])
    op(tensors, **(SCALARS | options))
    lists.assert_same_bits(tensors[0], gradients)
    for found, value in zip(tensors[1:3], values, strict=True):
        working = lists.ROUNDING[F64 if found and found[0].dtype == F64 else F32]
        largest = max((float(v.abs().max()) for v in value if v.numel()), default=1.0)
        lists.assert_near(found, value, arithmetic=roundings, smallest=roundings * working * largest)
    if len(tensors) > 3:
        lists.assert_near(tensors[3], lists.exact(tensors[1]), arithmetic=0)


def launches(variant):
    return sum(n for name, n in variant.kernels.items() if "lars" in name)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dtypes", DTYPES + MODEL, ids=lambda dtypes: "-".join(str(d)[6:] for d in dtypes))
def test_values(variant, multi_tensor_lars, dtypes, nesterov):
    run(multi_tensor_lars, state(variant.device, dtypes), nesterov=nesterov)
    if variant.simt:
        assert launches(variant) == 2


def test_large_tensors(variant):
    """Sums of many squares in float32: the reference's, torch's own norm, is off by 34 roundings here."""
    tensors = state(variant.device, (BF16, F32, F32, BF16), lists.SHAPES)
    run(dispatcher, tensors, roundings=48 if variant.name == "reference" else 24)


@pytest.mark.parametrize(
    "options",
    [dict(weight_decay=0.0), dict(eps=0.0), dict(lr=0.0), dict(momentum=0.0), dict(scale=1.0)],
    ids=str,
)
def test_options(variant, options):
    run(dispatcher, state(variant.device), **options)


def test_one_learning_rate_for_all(variant, multi_tensor_lars):
    """No norms, no launch for them."""
    run(multi_tensor_lars, state(variant.device), is_skipped=True, lr=0.1)
    if variant.simt:
        assert launches(variant) == 1


@pytest.mark.parametrize("zero", ["gradient", "parameter"])
def test_where_a_norm_is_zero(variant, multi_tensor_lars, zero):
    tensors = state(variant.device)
    tensors[0 if zero == "gradient" else 1][3].zero_()
    run(multi_tensor_lars, tensors)


def test_norms_from_elsewhere(variant, multi_tensor_lars):
    """As public apex passes them; one launch."""
    tensors = state(variant.device, (BF16, BF16, F32))
    count = len(tensors[0])
    norms = dict(
        grad_norms=torch.linspace(0.0, 3.0, count, device=variant.device, dtype=F32),
        param_norms=torch.linspace(4.0, 1.0, count, device=variant.device, dtype=F32),
    )
    run(multi_tensor_lars, tensors, **norms)
    if variant.simt:
        assert launches(variant) == 1


def test_misaligned_views(variant, multi_tensor_lars):
    for k in range(3):
        tensors = state(variant.device)
        tensors[k] = lists.misaligned(tensors[k])
        run(multi_tensor_lars, tensors)


def test_memory_orders(variant, multi_tensor_lars):
    """Gradients may have other strides than their parameters."""
    tensors = [lists.channels_last(F32, variant.device, seed=10 * k) for k in range(3)]
    run(multi_tensor_lars, tensors)
    run(multi_tensor_lars, [[g.contiguous() for g in tensors[0]], *tensors[1:]])


@pytest.mark.parametrize("given", [False, True])
def test_mixed_dtypes_in_one_call(variant, multi_tensor_lars, given):
    columns = [[], [], []]
    for turn in range(2):
        for dtypes in DTYPES:
            new = state(variant.device, dtypes, ((5,), (3, 0), (130 + turn,)))
            for column, tensors in zip(columns, new, strict=True):
                column += tensors
    norms = {}
    if given:
        some = torch.linspace(0.5, 3.0, len(columns[0]), device=variant.device, dtype=F32)
        norms = dict(grad_norms=some, param_norms=some.flip(0))
    run(multi_tensor_lars, columns, **norms)
    if variant.simt:
        assert launches(variant) == (1 if given else 2) * len(DTYPES)


def test_scalars_on_the_device(variant, multi_tensor_lars):
    options = dict(lr_tensor=scalar(0.25, variant.device), inv_scale=scalar(0.125, variant.device))
    tensors = state(variant.device, (F16, F32, F32))
    parameters, _ = expected(tensors, 0.125, lr=0.25)
    multi_tensor_lars(tensors, **(SCALARS | options | dict(lr=99.0)))
    lists.assert_near(tensors[1], parameters, smallest=2e-6)


@pytest.mark.parametrize("what", ["found_inf", "noop_flag"])
def test_a_flagged_step_changes_nothing(variant, multi_tensor_lars, what):
    raised = scalar(1.0, variant.device) if what == "found_inf" else flag(variant.device, 1)
    down = scalar(0.0, variant.device) if what == "found_inf" else flag(variant.device)
    tensors = state(variant.device, MODEL[2])
    before = [lists.clones(column) for column in tensors]
    multi_tensor_lars(tensors, **(SCALARS | {what: raised}))
    for column, old in zip(tensors, before, strict=True):
        lists.assert_same_bits(column, old)
    run(multi_tensor_lars, tensors, **{what: down})


def test_bad_input_raises_before_anything_runs(variant, multi_tensor_lars):
    if not bindings.load().native:
        pytest.skip(f"the reference alone does not check its input: {bindings.load().reason}")
    tensors = state(variant.device)
    before = [lists.clones(column) for column in tensors]
    norms = torch.ones(5, device=variant.device, dtype=F32)
    cases = [
        (ValueError, "go together", tensors, {"grad_norms": norms}),
        (
            TypeError,
            "grad_norms must be a float32",
            tensors,
            dict(grad_norms=norms.half(), param_norms=norms),
        ),
        (ValueError, "param_norms holds 2", tensors, dict(grad_norms=norms, param_norms=norms[:2])),
        (TypeError, "no variant takes", [[t.double() for t in tensors[0]], *tensors[1:]], {}),
        (ValueError, "momentums holds 1", [*tensors[:2], tensors[2][:1]], {}),
        (TypeError, "lr_tensor must be a Float", tensors, {"lr_tensor": scalar(1.0, variant.device, F64)}),
    ]
    for error, words, columns, changes in cases:
        with pytest.raises(error, match=words):
            multi_tensor_lars(columns, **(SCALARS | changes))
    for column, old in zip(tensors, before, strict=True):
        lists.assert_same_bits(column, old)


def test_opcheck():
    bindings.load()
    for dtypes in ((F32, F32, F32), (BF16, F32, F32, BF16)):
        tensors = state("cpu", dtypes, ((3,), (2, 5)))
        columns = [*tensors, *[[]] * (4 - len(tensors))]
        options = SCALARS | dict(noop_flag=flag("cpu"))
        torch.library.opcheck(torch.ops.apex.multi_tensor_lars.default, tuple(columns), options)
