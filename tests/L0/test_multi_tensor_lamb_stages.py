"""multi_tensor_lamb_stage1 and _stage2 against the algorithm in float64, by every entrance.

Tolerance: as test_fused_lamb.py; both stages together are one LAMB step.
"""

from __future__ import annotations

import lamb
import lists
import pytest
import torch
from lists import BF16, F16, F32, F64, flag, scalar

from apex._loader import bindings

TYPES = [
    (g, p, u)
    for half in (F16, BF16)
    for g in (F32, half)
    for p in (F32, half)
    for u in (F32, half)
]  # fmt: skip
STEP, BETA1, BETA2, EPS = 3, 0.9, 0.999, 1e-6


def dispatcher(op, tensors, *scalars, **options):
    getattr(torch.ops.apex, op)(*tensors, *scalars, **options)


def direct(op, tensors, *scalars, **options):
    module = bindings.load().module
    if module is None:
        pytest.skip(f"no bindings: {bindings.load().reason}")
    getattr(module, op)(tensors, *scalars, **options)


@pytest.fixture(params=[dispatcher, direct], ids=lambda f: f.__name__)
def entrance(request):
    bindings.load()
    return request.param


def _state(device, gradient, parameter, update):
    grads = lists.random(gradient, device, lists.FEW, seed=1)
    params, averages = (lists.random(parameter, device, lists.FEW, seed=k) for k in (2, 3))
    squares = [x.abs() for x in lists.random(parameter, device, lists.FEW, seed=4)]
    return [grads, params, averages, squares, lists.empties(grads, update)]


def _expected(tensors, decays, clip):
    """(updates, exp_avgs, exp_avg_sqs) in float64."""
    found = ([], [], [])
    rows = zip(*map(lists.exact, tensors[:4]), decays, strict=True)
    for g, p, m, v, decay in rows:
        m = BETA1 * m + (1 - BETA1) * g * clip
        v = BETA2 * v + (1 - BETA2) * (g * clip) ** 2
        update = (m / (1 - BETA1**STEP)) / ((v / (1 - BETA2**STEP)).sqrt() + EPS) + decay * p
        for column, value in zip(found, (update, m, v), strict=True):
            column.append(value)
    return found


@pytest.mark.parametrize("types", dict.fromkeys(TYPES), ids=lambda t: "-".join(str(d)[6:] for d in t))
def test_stage1(variant, entrance, types):
    tensors = _state(variant.device, *types)
    decays = [0.1 * i for i in range(len(lists.FEW))]
    updates, averages, squares = _expected(tensors, decays, clip=0.25)
    per_tensor = torch.tensor(decays, dtype=F32, device=variant.device)
    norm = scalar(8.0, variant.device)
    entrance("multi_tensor_lamb_stage1", tensors, per_tensor, STEP, BETA1, BETA2, EPS, norm, 2.0)
    for found, value in ((tensors[4], updates), (tensors[2], averages), (tensors[3], squares)):
        lists.assert_near(found, value, arithmetic=64, smallest=64 * lists.ROUNDING[F32])


def _norms(column):
    """float64: the L2 norm of every tensor."""
    return torch.stack([x.norm() for x in column])


def _measures(device, count):
    """What stage 1 measures into."""
    names = "per_tensor_param_norm", "per_tensor_update_norm"
    return {name: torch.full((count,), 7.0, dtype=F32, device=device) for name in names}


@pytest.mark.parametrize("types", dict.fromkeys(TYPES), ids=lambda t: "-".join(str(d)[6:] for d in t))
def test_stage1_measures_parameters_and_updates(variant, entrance, types):
    """An empty tensor's norms are 0; those of updates are of what was not rounded to their dtype yet."""
    tensors = _state(variant.device, *types)
    decays = [0.1 * i for i in range(len(lists.FEW))]
    updates, *_ = _expected(tensors, decays, clip=0.25)
    wanted = [_norms(column) for column in (lists.exact(tensors[1]), updates)]
    per_tensor = torch.tensor(decays, dtype=F32, device=variant.device)
    arguments = [per_tensor, STEP, BETA1, BETA2, EPS, scalar(8.0, variant.device), 2.0]
    measured = _measures(variant.device, len(lists.FEW))
    for flags in (dict(noop_flag=flag(variant.device, 1)), dict(found_inf=scalar(1.0, variant.device))):
        entrance("multi_tensor_lamb_stage1", tensors, *arguments, **flags, **measured)
        assert all((norms == 7).all() for norms in measured.values())  # nothing was measured
    versions = [norms._version for norms in measured.values()]
    entrance("multi_tensor_lamb_stage1", tensors, *arguments, **measured)
    assert all(norms._version > old for norms, old in zip(measured.values(), versions, strict=True))
    lists.assert_near(list(measured.values()), wanted, arithmetic=64, smallest=64 * lists.ROUNDING[F32])


def test_stage1_measures_long_tensors_and_none(variant):
    """A tensor of many chunks, and a call whose tensors are all empty."""
    tensors = [lists.random(F32, variant.device, [(1 << 20,), (3,)], seed=k) for k in (1, 2, 3, 4)]
    tensors[3] = [x.abs() for x in tensors[3]]
    tensors.append(lists.empties(tensors[0]))
    updates, *_ = _expected(tensors, [0.1, 0.2], clip=1.0)
    wanted = [_norms(column) for column in (lists.exact(tensors[1]), updates)]
    decays, measured = (
        torch.tensor([0.1, 0.2], dtype=F32, device=variant.device),
        _measures(variant.device, 2),
    )
    arguments = [decays, STEP, BETA1, BETA2, EPS, None, 0.0]
    dispatcher("multi_tensor_lamb_stage1", tensors, *arguments, **measured)
    lists.assert_near(list(measured.values()), wanted, arithmetic=64)
    nothing = [[x[:0] for x in column] for column in tensors]
    dispatcher("multi_tensor_lamb_stage1", nothing, *arguments, **measured)
    assert not any(norms.any() for norms in measured.values())


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("nvlamb", [False, True])
@pytest.mark.parametrize(
    ("parameter", "update"),
    [(F32, F32), (F32, F16), (F32, BF16), (F16, F32), (F16, F16), (BF16, F32), (BF16, BF16)],
    ids=str,
)
def test_stage2(variant, entrance, parameter, update, nvlamb, decay):
    params = lists.random(parameter, variant.device, lists.FEW, seed=1)
    updates = lists.random(update, variant.device, lists.FEW, seed=2)
    p_norms = torch.tensor([0.0, 2.0, 3.0, 0.0, 1.0], device=variant.device, dtype=F32)
    u_norms = torch.tensor([1.0, 4.0, 0.0, 0.0, 3.0], device=variant.device, dtype=F32)
    wanted = []
    for p, u, a, b in zip(lists.exact(params), lists.exact(updates), p_norms, u_norms, strict=True):
        ratio = (a / b).double().item() if a and b and (nvlamb or decay) else 1.0
        wanted.append(p - 0.05 * ratio * u)
    entrance("multi_tensor_lamb_stage2", [params, updates, []], p_norms, u_norms, 0.05, decay, nvlamb)
    lists.assert_near(params, wanted, arithmetic=8, smallest=8 * lists.ROUNDING[F32])


@pytest.mark.parametrize("nvlamb", [False, True])
@pytest.mark.parametrize("model", [F16, BF16], ids=str)
def test_stage2_with_decays_and_copies(variant, entrance, model, nvlamb):
    """Each tensor's own decay says whether norms scale its step; copies are the rounded parameters."""
    params, updates = (lists.random(F32, variant.device, lists.FEW, seed=k) for k in (1, 2))
    copies = lists.empties(params, model)
    norms = [torch.tensor([2.0, 4.0, 1.0, 8.0, c], device=variant.device, dtype=F32) for c in (6.0, 3.0)]
    norms[1][1:4] = 2.0
    decays = torch.tensor([0.1, 0.0, 0.1, 0.1, 0.0], device=variant.device, dtype=F32)
    wanted = []
    for p, u, a, b, decay in zip(lists.exact(params), lists.exact(updates), *norms, decays, strict=True):
        wanted.append(p - 0.25 * (float(a / b) if nvlamb or decay else 1.0) * u)
    tensors = [params, updates, copies]
    for flags in (dict(noop_flag=flag(variant.device, 1)), dict(found_inf=scalar(1.0, variant.device))):
        before = [lists.clones(column) for column in tensors]
        stage2(entrance, tensors, norms, variant, nvlamb, per_tensor_decay=decays, **flags)
        for column, old in zip(tensors, before, strict=True):
            lists.assert_same_bits(column, old)
    stage2(entrance, tensors, norms, variant, nvlamb, per_tensor_decay=decays, noop_flag=flag(variant.device))
    lists.assert_near(params, wanted, arithmetic=8, smallest=8 * lists.ROUNDING[F32])
    lists.assert_same_bits(copies, [p.to(model) for p in params])


def stage2(entrance, tensors, norms, variant, nvlamb, **options):
    rate = scalar(0.25, variant.device)
    entrance("multi_tensor_lamb_stage2", tensors, *norms, 9.0, 0.0, nvlamb, lr_tensor=rate, **options)


@pytest.mark.parametrize("mode", [0, 1])
def test_stage1_with_scalars_of_each_tensor(variant, entrance, mode):
    tensors = _state(variant.device, F32, F32, F32)
    own = dict(beta1=0.5, beta2=0.75, gradient_share=0.25, eps=1e-3, bias_correction=0.0)
    count = len(lists.FEW)
    values = {name: [v * (1 + (k % 2) / 4) for k in range(count)] for name, v in own.items()}
    values["bias_correction"] = [float(k % 2) for k in range(count)]
    decays = [0.125 * k for k in range(count)]
    found = [[], [], []]
    rows = zip(*map(lists.exact, tensors[:4]), decays, *values.values(), strict=True)
    for g, p, m, v, decay, b1, b2, share, eps, correct in rows:
        g = g * 0.5 + (0 if mode else decay * p)
        m, v = b1 * m + share * g, b2 * v + (1 - b2) * g * g
        c1, c2 = (1 - b1**STEP, 1 - b2**STEP) if correct else (1, 1)
        u = (m / c1) / ((v / c2).sqrt() + eps) + (decay * p if mode else 0)
        for column, value in zip(found, (u, m, v), strict=True):
            column.append(value)
    given = {f"per_tensor_{n}": torch.tensor(v, dtype=F32, device=variant.device) for n, v in values.items()}
    options = given | dict(
        step_tensor=scalar(STEP, variant.device, torch.int32),
        inv_scale=scalar(0.5, variant.device),
        decay_mode=mode,
    )
    per_tensor = torch.tensor(decays, dtype=F32, device=variant.device)
    arguments = [per_tensor, 0, 0.0, 0.0, 9.0, None, 0.0]
    before = [lists.clones(column) for column in tensors]
    entrance("multi_tensor_lamb_stage1", tensors, *arguments, **options, noop_flag=flag(variant.device, 1))
    for column, old in zip(tensors, before, strict=True):
        lists.assert_same_bits(column, old)
    entrance("multi_tensor_lamb_stage1", tensors, *arguments, **options, noop_flag=flag(variant.device))
    for column, value in zip((tensors[4], tensors[2], tensors[3]), found, strict=True):
        lists.assert_near(column, value, arithmetic=64, smallest=64 * lists.ROUNDING[F32])


@pytest.mark.parametrize(("average", "correct"), [(False, True), (True, False)])
def test_stage1_options(variant, average, correct):
    tensors = _state(variant.device, F32, F32, F32)
    wanted = []
    for g, _, m, v in zip(*map(lists.exact, tensors[:4]), strict=True):
        m = BETA1 * m + (1 - BETA1 if average else 1.0) * g
        v = BETA2 * v + (1 - BETA2) * g * g
        c1, c2 = (1 - BETA1**STEP, 1 - BETA2**STEP) if correct else (1, 1)
        wanted.append((m / c1) / ((v / c2).sqrt() + EPS))
    decays = torch.zeros(len(lists.FEW), dtype=F32, device=variant.device)
    options = dict(bias_correction=correct, grad_averaging=average)
    dispatcher("multi_tensor_lamb_stage1", tensors, decays, STEP, BETA1, BETA2, EPS, None, 0.0, **options)
    lists.assert_near(tensors[4], wanted, arithmetic=64, smallest=64 * lists.ROUNDING[F32])


def test_both_are_one_step_of_lamb(variant):
    tensors = _state(variant.device, F32, F32, F32)
    for state in (*tensors[2], *tensors[3]):
        state.zero_()
    wanted = []
    for g, p in zip(*map(lists.exact, tensors[:2]), strict=True):
        wanted.append(lamb.update({}, p, g, 1.0, 1, dict(weight_decay=0.1)))
    decays = torch.full((len(lists.FEW),), 0.1, device=variant.device, dtype=F32)
    norm = scalar(1.0, variant.device)
    dispatcher("multi_tensor_lamb_stage1", tensors, decays, 1, BETA1, BETA2, EPS, norm, 0.0)
    norms = [
        torch.stack([x.norm() if x.numel() else x.new_zeros(()) for x in column])
        for column in (tensors[1], tensors[4])
    ]
    dispatcher("multi_tensor_lamb_stage2", [tensors[1], tensors[4], []], *norms, 0.05, 0.1)
    lists.assert_near(tensors[1], wanted, arithmetic=64, smallest=64 * lists.ROUNDING[F32])


def test_buckets_keep_their_own_numbers(variant):
    """Tensors of several dtypes in one call: each takes its own element of per_tensor_decay, and writes that of its
    norms."""
    kinds = [F32, F16, F32, BF16]
    tensors = [[lists.random(d, variant.device, [(5,)], seed=s)[0] for d in kinds] for s in (1, 2, 3, 4)]
    tensors[3] = [x.abs() for x in tensors[3]]
    tensors.append(lists.empties(tensors[0]))
    decays = [0.0, 1.0, 2.0, 3.0]
    updates, *_ = _expected(tensors, decays, clip=1.0)
    per_tensor = torch.tensor(decays, dtype=F32, device=variant.device)
    norm, measured = scalar(1.0, variant.device), _measures(variant.device, len(kinds))
    wanted = [_norms(column) for column in (lists.exact(tensors[1]), updates)]
    arguments = [per_tensor, STEP, BETA1, BETA2, EPS, norm, 2.0]
    dispatcher("multi_tensor_lamb_stage1", tensors, *arguments, **measured)
    lists.assert_near(tensors[4], updates, arithmetic=64, smallest=64 * lists.ROUNDING[F32])
    lists.assert_near(list(measured.values()), wanted, arithmetic=64)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (dict(decays=3), ValueError),
        (dict(decays=6, dtype=F64), TypeError),
        (dict(step=0), ValueError),
        (dict(measured=["per_tensor_param_norm"]), ValueError),
        (dict(measured=["per_tensor_update_norm"]), ValueError),
        (dict(measured=["per_tensor_param_norm", "per_tensor_update_norm"], norms=3), ValueError),
    ],
    ids=str,
)
def test_refuses(variant, changes, error):
    tensors = _state(variant.device, F32, F32, F32)
    count = changes.get("decays", len(lists.FEW))
    per_tensor = torch.zeros(count, device=variant.device, dtype=changes.get("dtype", F32))
    norm = scalar(1.0, variant.device)
    measured = _measures(variant.device, changes.get("norms", len(lists.FEW)))
    measured = {name: measured[name] for name in changes.get("measured", ())}
    if variant.name == "reference":
        pytest.skip("arguments are checked before the reference is called where a binding is loaded")
    with pytest.raises(error):
        dispatcher(
            "multi_tensor_lamb_stage1",
            tensors,
            per_tensor,
            changes.get("step", STEP),
            BETA1,
            BETA2,
            EPS,
            norm,
            1.0,
            **measured,
        )
