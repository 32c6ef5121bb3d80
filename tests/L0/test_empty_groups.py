"""Groups without parameters, and groups whose parameters received no gradient, count their steps as all others do."""

from __future__ import annotations

import lists
import pytest
import torch
import training
from lists import F32, F64

from apex.optimizers import FusedAdam, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad

OPTIMIZERS = {
    "adam": lambda groups: FusedAdam(groups, lr=0.125),
    "adam, capturable": lambda groups: FusedAdam(groups, lr=0.125, capturable=True),
    "lamb": lambda groups: FusedLAMB(groups, lr=0.125),
    "novograd": lambda groups: FusedNovoGrad(groups, lr=0.125),
    "novograd, capturable": lambda groups: FusedNovoGrad(groups, lr=0.125, capturable=True),
    "mixed precision lamb": lambda groups: FusedMixedPrecisionLamb(groups, lr=0.125),
}


def counts(optimizer):
    return [int(group["step"]) for group in optimizer.param_groups]


def step(optimizer, params, seed):
    for i, p in enumerate(params):
        (p.grad,) = lists.random(p.dtype, p.device, [p.shape], seed=100 * seed + i)
    optimizer.step()


def start(name, device):
    """(optimizer, its first parameter): groups with a parameter, without, and with one that receives no gradient."""
    params = training.parameters(F32, device, ((5,), (3,)))
    groups = [{"params": params[:1]}, {"params": []}, {"params": params[1:]}]
    return OPTIMIZERS[name](groups), params[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_groups_count(variant, name):
    optimizer, p = start(name, variant.device)
    for seed in range(3):
        step(optimizer, [p], seed)
    assert counts(optimizer) == [3, 3, 3]


@pytest.mark.parametrize(
    "name", [name for name in OPTIMIZERS if name != "lamb"]
)  # whose steps the host skips
def test_a_step_that_is_skipped_on_the_device_counts_nowhere(variant, name):
    optimizer, p = start(name, variant.device)
    for seed, found in enumerate((0.0, 1.0, 0.0, 1.0)):
        optimizer.found_inf = lists.scalar(found, variant.device)
        step(optimizer, [p], seed)
    assert counts(optimizer) == [2, 2, 2]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_parameter_that_joins_is_corrected_by_the_groups_count(variant, name):
    """As one that was there and received no gradient; both trees of public apex keep one count a group."""
    moved = []
    for late in (False, True):
        first, second = training.parameters(F32, variant.device, ((5,), (3,)))
        optimizer = OPTIMIZERS[name]([{"params": [first]}, {"params": [] if late else [second]}])
        for seed in range(3):
            step(optimizer, [first], seed)
        if late:
            optimizer.param_groups[1]["params"].append(second)
        for seed in (4, 5):
            step(optimizer, [first, second], seed)
        moved.append([first, second])
        assert counts(optimizer) == [5, 5]
    lists.assert_same_bits(*moved)


def test_adams_correction_is_the_groups(variant):
    (first,), (second,) = (training.parameters(F64, variant.device, ((4,),), seed=s) for s in (1, 2))
    optimizer = FusedAdam([{"params": [first]}, {"params": []}], lr=0.125, betas=(0.5, 0.75), eps=0.0)
    for seed in range(2):
        step(optimizer, [first], seed)
    optimizer.param_groups[1]["params"].append(second)
    before = second.detach().clone()
    step(optimizer, [first, second], 3)
    mean, square = 0.5 * second.grad / (1 - 0.5**3), 0.25 * second.grad**2 / (1 - 0.75**3)
    torch.testing.assert_close(second.detach(), before - 0.125 * mean / square.sqrt())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_raises_counts_nowhere(variant, name):
    optimizer, p = start(name, variant.device)
    step(optimizer, [p], 1)
    p.grad.untyped_storage().resize_(0)
    with pytest.raises((RuntimeError, ValueError)):
        optimizer.step()
    assert counts(optimizer)[0] == 1
    step(optimizer, [p], 2)
    assert counts(optimizer)[0] == 2
