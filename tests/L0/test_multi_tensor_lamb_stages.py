"""multi_tensor_lamb_stage1 and _stage2 against the algorithm in float64, by every entrance.

Tolerance: as test_fused_lamb.py; both stages together are one LAMB step.
"""

from __future__ import annotations

import lamb
import lists
import pytest
import torch
from lists import BF16, F16, F32, F64, scalar

from apex._loader import bindings

TYPES = [
    (g, p, u)
    for half in (F16, BF16)
    for g in (F32, half)
    for p in (F32, half)
    for u in (F32, half)
]  # fmt: skip
STEP, BETA1, BETA2, EPS = 3, 0.9, 0.999, 1e-6


def dispatcher(op, tensors, *scalars):
    getattr(torch.ops.apex, op)(*tensors, *scalars)


def direct(op, tensors, *scalars):
    module = bindings.load().module
    if module is None:
        pytest.skip(f"no bindings: {bindings.load().reason}")
    getattr(module, op)(tensors, *scalars)


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
    entrance("multi_tensor_lamb_stage2", [params, updates], p_norms, u_norms, 0.05, decay, nvlamb)
    lists.assert_near(params, wanted, arithmetic=8, smallest=8 * lists.ROUNDING[F32])


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
    dispatcher("multi_tensor_lamb_stage2", [tensors[1], tensors[4]], *norms, 0.05, 0.1)
    lists.assert_near(tensors[1], wanted, arithmetic=64, smallest=64 * lists.ROUNDING[F32])


def test_buckets_keep_their_own_decays(variant):
    """Tensors of several dtypes in one call: each takes its own element of per_tensor_decay."""
    kinds = [F32, F16, F32, BF16]
    tensors = [[lists.random(d, variant.device, [(5,)], seed=s)[0] for d in kinds] for s in (1, 2, 3, 4)]
    tensors[3] = [x.abs() for x in tensors[3]]
    tensors.append(lists.empties(tensors[0]))
    decays = [0.0, 1.0, 2.0, 3.0]
    updates, *_ = _expected(tensors, decays, clip=1.0)
    per_tensor = torch.tensor(decays, dtype=F32, device=variant.device)
    norm = scalar(1.0, variant.device)
    dispatcher("multi_tensor_lamb_stage1", tensors, per_tensor, STEP, BETA1, BETA2, EPS, norm, 2.0)
    lists.assert_near(tensors[4], updates, arithmetic=64, smallest=64 * lists.ROUNDING[F32])


@pytest.mark.parametrize(
    ("changes", "error"),
    [(dict(decays=3), ValueError), (dict(decays=6, dtype=F64), TypeError), (dict(step=0), ValueError)],
    ids=str,
)
def test_refuses(variant, changes, error):
    tensors = _state(variant.device, F32, F32, F32)
    count = changes.get("decays", len(lists.FEW))
    per_tensor = torch.zeros(count, device=variant.device, dtype=changes.get("dtype", F32))
    norm = scalar(1.0, variant.device)
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
        )
