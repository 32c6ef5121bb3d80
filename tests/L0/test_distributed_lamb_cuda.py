"""The extensions distributed_lamb_cuda and fused_lamb_cuda of public apex, in float64."""

from __future__ import annotations

import inspect

import lists
import pytest
import torch
from lists import BF16, F16, F32, flag, scalar

from apex._bits import to_e5m2
from apex._legacy import distributed_lamb_cuda, fused_lamb_cuda
from apex._loader import registry

SIGNATURES = {
    "multi_tensor_lamb_compute_update_term": "chunk_size noop_flag tensor_lists per_tensor_beta1 per_tensor_beta2 "
    "per_tensor_beta3 per_tensor_bias_correction step per_tensor_epsilon mode per_tensor_decay global_scale "
    "global_grad_norm max_grad_norm",
    "multi_tensor_lamb_update_weights": "chunk_size noop_flag tensor_lists per_tensor_param_norm "
    "per_tensor_update_norm update_norm_offset learning_rate per_tensor_decay global_grad_norm use_nvlamb",
}
LAMB = (
    "chunk_size noop_flag tensor_lists lr beta1 beta2 epsilon step bias_correction weight_decay grad_averaging mode "
    "global_grad_norm max_grad_norm"
)
STEP, SCALE, NORM = 3, 4.0, 32.0


def test_argument_orders_and_names():
    assert set(distributed_lamb_cuda.__all__) == set(SIGNATURES) and fused_lamb_cuda.__all__ == ["lamb"]
    for name, wanted in SIGNATURES.items():
        assert list(inspect.signature(getattr(distributed_lamb_cuda, name)).parameters) == wanted.split()
    assert list(inspect.signature(fused_lamb_cuda.lamb).parameters) == LAMB.split()
    for name in ("distributed_lamb_cuda", "fused_lamb_cuda"):
        assert registry.extensions()[name].state == "complete"


def numbers(device, *values, dtype=F32):
    return torch.tensor(values, dtype=dtype, device=device)


def compute(tensors, device, mode=1, limit=0.0, noop=0):
    count = range(len(lists.FEW))
    per_tensor = dict(
        beta1=[0.5 + k / 16 for k in count], beta2=[0.75] * len(count), beta3=[0.25 + k / 8 for k in count],
        bias_correction=[k % 2 for k in count], epsilon=[1e-3 * (k + 1) for k in count], decay=[k / 8 for k in count],
    )  # fmt: skip
    given = {f"per_tensor_{name}": numbers(device, *values) for name, values in per_tensor.items()}
    given["per_tensor_bias_correction"] = given["per_tensor_bias_correction"].int()
    distributed_lamb_cuda.multi_tensor_lamb_compute_update_term(
        64, flag(device, noop), tensors, step=flag(device, STEP), mode=mode, global_scale=scalar(SCALE, device),
        global_grad_norm=scalar(NORM, device), max_grad_norm=limit, **given,
    )  # fmt: skip
    return per_tensor


@pytest.mark.parametrize("limit", [0.0, 2.0, 64.0])
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("gradient", [F32, F16], ids=str)
def test_update_term(variant, gradient, mode, limit):
    g, p, m, v = (lists.random(F32, variant.device, lists.FEW, seed=k) for k in range(4))
    tensors = [[x.to(gradient) for x in g], p, m, [x.square() for x in v], lists.empties(p)]
    before = [lists.clones(column) for column in tensors]
    compute(tensors, variant.device, mode, limit, noop=1)
    for column, old in zip(tensors, before, strict=True):
        lists.assert_same_bits(column, old)
    s = compute(tensors, variant.device, mode, limit)
    factor = min(1.0, limit / (NORM / SCALE + 1e-6)) / SCALE if limit else 1 / SCALE
    found = [[], [], []]
    for k, (g, p, m, v) in enumerate(zip(*map(lists.exact, before[:4]), strict=True)):
        g = g * factor + (0 if mode else s["decay"][k] * p)
        m = s["beta1"][k] * m + s["beta3"][k] * g
        v = s["beta2"][k] * v + (1 - s["beta2"][k]) * g * g
        c1, c2 = (1 - s["beta1"][k] ** STEP, 1 - s["beta2"][k] ** STEP) if s["bias_correction"][k] else (1, 1)
        u = (m / c1) / ((v / c2).sqrt() + s["epsilon"][k]) + (s["decay"][k] * p if mode else 0)
        for column, value in zip(found, (u, m, v), strict=True):
            column.append(value)
    for column, value in zip((tensors[4], tensors[2], tensors[3]), found, strict=True):
        lists.assert_near(column, value, arithmetic=64, smallest=64 * lists.ROUNDING[F32])


@pytest.mark.parametrize("nvlamb", [False, True])
@pytest.mark.parametrize("copy", [F32, F16, BF16, torch.uint8], ids=str)
def test_update_weights(variant, copy, nvlamb):
    device = variant.device
    u, p = (lists.random(F32, device, lists.FEW, seed=k) for k in range(2))
    tensors = [u, p, lists.empties(p, copy, fill=7)]
    decays, offsets = [0.1, 0.0, 0.1, 0.0, 0.1], [3, 0, 2, 2, 1]
    of_params, of_updates = [2.0, 3.0, 0.0, 8.0, 5.0], [1.0, 4.0, 2.0, 0.0]

    def run(noop):
        distributed_lamb_cuda.multi_tensor_lamb_update_weights(
            64, flag(device, noop), tensors, numbers(device, *of_params), numbers(device, *of_updates),
            numbers(device, *offsets, dtype=torch.int64), scalar(0.25, device), numbers(device, *decays),
            scalar(NORM, device), nvlamb,
        )  # fmt: skip

    before = [lists.clones(column) for column in tensors]
    run(1)
    for column, old in zip(tensors, before, strict=True):
        lists.assert_same_bits(column, old)
    run(0)
    wanted = []
    for k, (u, p) in enumerate(zip(*map(lists.exact, before[:2]), strict=True)):
        pair = of_params[k], of_updates[offsets[k]]
        ratio = pair[0] / pair[1] if all(pair) and (nvlamb or decays[k]) else 1.0
        wanted.append(p - 0.25 * ratio * u)
    lists.assert_near(tensors[1], wanted, arithmetic=8, smallest=16 * lists.ROUNDING[F32])
    rounded = [to_e5m2(p) if copy == torch.uint8 else p.to(copy) for p in tensors[1]]
    lists.assert_same_bits(tensors[2], rounded)


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("limit", [0.0, 2.0])
def test_lamb_is_amp_C_s_with_a_number_for_the_norm(variant, dtype, limit):
    from apex._legacy import amp_C

    tensors = [lists.random(dtype, variant.device, lists.FEW, seed=k) for k in range(3)]
    tensors.append([x.square() for x in tensors[2]])
    twins = [lists.clones(column) for column in tensors]
    options = 0.25, 0.9, 0.99, 1e-3, STEP, 1, 0.1, 1, 1
    fused_lamb_cuda.lamb(64, flag(variant.device), tensors, *options, 8.0, limit)
    amp_C.multi_tensor_lamb(64, flag(variant.device), twins, *options, scalar(8.0, variant.device), limit)
    for column, twin in zip(tensors, twins, strict=True):
        lists.assert_same_bits(column, twin)
    fused_lamb_cuda.lamb(64, flag(variant.device), [[], [], [], []], *options, 8.0, limit)


def test_refuses():
    p = [torch.ones(3, dtype=F32, device="cpu")]
    one = numbers("cpu", 1.0)
    offset = numbers("cpu", 0, dtype=torch.int64)
    rest = one, one, offset, one, one, one, False
    with pytest.raises(ValueError, match="three lists"):
        distributed_lamb_cuda.multi_tensor_lamb_update_weights(64, flag("cpu"), [p, p], *rest)
    with pytest.raises(ValueError, match="a copy has"):
        distributed_lamb_cuda.multi_tensor_lamb_update_weights(64, flag("cpu"), [p, p, [one]], *rest)
    assert (p[0] == 1).all()
