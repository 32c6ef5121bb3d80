"""The extension distributed_adam_cuda of public apex: names, argument orders, and each function in float64."""

from __future__ import annotations

import inspect
import itertools

import lists
import pytest
import torch
from lists import BF16, F16, F32, F64, flag, scalar

from apex._bits import join_remainders, split_remainders
from apex._legacy import distributed_adam_cuda
from apex._loader import registry

NAMES = [
    "multi_tensor_fused_adam",
    "multi_tensor_fused_adam_capturable",
    "multi_tensor_fused_adam_with_param_remainders",
]
ORDER = (
    "chunk_size noop_flag tensor_lists grad_scale lr beta1 beta2 eps step mode bias_correction weight_decay"
)
LR, BETA1, BETA2, EPS, STEP, DECAY, SCALE = 0.25, 0.875, 0.75, 0.125, 3, 0.5, 0.125
SHAPES = ((7,), (0,), (33, 5))


def test_argument_orders_and_names():
    assert distributed_adam_cuda.__all__ == NAMES
    for name in NAMES:
        assert list(inspect.signature(getattr(distributed_adam_cuda, name)).parameters) == ORDER.split()
    assert registry.extensions()["distributed_adam_cuda"].state == "complete"


def state(device, own, gradient, copy):
    """[parameters, exp_avgs, exp_avg_sqs, gradients, copies]"""
    p, m, v, g = (lists.random(own, device, SHAPES, seed=k) for k in range(4))
    return [p, m, [x.square() for x in v], [(8 * x).to(gradient) for x in g], lists.empties(p, copy)]


def expected(tensors, mode=1, correct=True):
    """[parameters], [exp_avgs], [exp_avg_sqs] in float64."""
    results = []
    for p, m, v, g in zip(*map(lists.exact, tensors[:4]), strict=True):
        g = g * SCALE + (0 if mode else DECAY * p)
        m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
        c1, c2 = (1 - BETA1**STEP, 1 - BETA2**STEP) if correct else (1, 1)
        results.append((p - LR * ((m / c1) / ((v / c2).sqrt() + EPS) + (DECAY * p if mode else 0)), m, v))
    return [list(column) for column in zip(*results, strict=True)]


def check(tensors, wanted):
    for found, value in zip(tensors, wanted, strict=False):
        lists.assert_near(found, value, arithmetic=8, smallest=16 * lists.ROUNDING[F32])
    lists.assert_same_bits(tensors[4], [p.to(c.dtype) for p, c in zip(tensors[0], tensors[4], strict=True)])


def fused(tensors, device, noop=1, mode=1, correct=True):
    options = LR, BETA1, BETA2, EPS, STEP, mode, int(correct), DECAY
    distributed_adam_cuda.multi_tensor_fused_adam(
        64, flag(device, noop), tensors, scalar(SCALE, device), *options
    )


def capturable(tensors, device, noop=0, mode=1, correct=True):
    rate, step = scalar(LR, device), flag(device, STEP)
    options = rate, BETA1, BETA2, EPS, step, mode, int(correct), DECAY
    run = distributed_adam_cuda.multi_tensor_fused_adam_capturable
    run(64, flag(device, noop), tensors, scalar(SCALE, device), *options)
    assert step.item() == STEP


@pytest.mark.parametrize("run", [fused, capturable])
@pytest.mark.parametrize(
    "types", itertools.product((F32, F16, BF16), repeat=3), ids=lambda t: "-".join(map(str, t))
)
def test_every_dtype(variant, run, types):
    tensors = state(variant.device, *types)
    wanted = expected(tensors)
    run(tensors, variant.device)
    check(tensors, wanted)


@pytest.mark.parametrize("run", [fused, capturable])
@pytest.mark.parametrize(("mode", "correct"), [(0, True), (1, False)])
def test_options(variant, run, mode, correct):
    tensors = state(variant.device, F32, F16, F16)
    wanted = expected(tensors, mode, correct)
    run(tensors, variant.device, mode=mode, correct=correct)
    check(tensors, wanted)


@pytest.mark.parametrize("types", [(F32, F16, F16), (F16, F16, F16), (F32, BF16, F16)], ids=str)
def test_a_raised_flag_changes_nothing(variant, types):
    tensors = state(variant.device, *types)
    before = [lists.clones(column) for column in tensors]
    capturable(tensors, variant.device, noop=1)
    for column, old in zip(tensors, before, strict=True):
        lists.assert_same_bits(column, old)


@pytest.mark.parametrize("bits", [BF16, torch.int16], ids=str)
@pytest.mark.parametrize("gradient", [F32, F16, BF16], ids=str)
def test_param_remainders(variant, gradient, bits):
    """Exactly the float32 step, kept in two halves."""
    tensors = state(variant.device, F32, gradient, BF16)
    split = [split_remainders(p) for p in tensors[0]]
    params = [rounded.view(bits).clone() for rounded, _ in split]
    remainders = [rest.clone() for _, rest in split]
    states = [lists.clones(column) for column in tensors[1:3]]
    copies = [torch.zeros_like(p) for p in params]
    given = [params, remainders, *states, tensors[3], copies]
    run = distributed_adam_cuda.multi_tensor_fused_adam_with_param_remainders
    options = LR, BETA1, BETA2, EPS, STEP, 1, 1, DECAY
    run(64, flag(variant.device), given, scalar(SCALE, variant.device), *options)
    fused(tensors, variant.device)
    found = [join_remainders(c.view(BF16), r) for c, r in zip(copies, remainders, strict=True)]
    lists.assert_same_bits(found, tensors[0])
    for column, wanted in zip(states, tensors[1:3], strict=True):
        lists.assert_same_bits(column, wanted)


@pytest.mark.parametrize(
    ("lists_given", "error"),
    [(lambda t: t[:4], ValueError), (lambda t: [[x.to(F64) for x in t[0]], *t[1:]], TypeError),
     (lambda t: [*t[:4], t[4][:1]], ValueError)],
)  # fmt: skip
def test_refuses(lists_given, error):
    tensors = state("cpu", F32, F32, F32)
    before = [lists.clones(column) for column in tensors]
    with pytest.raises(error):
        fused(lists_given(tensors), "cpu")
    for column, old in zip(tensors, before, strict=True):
        lists.assert_same_bits(column, old)
