"""FusedAdam's checkpoints go to torch.optim and to public apex, and theirs come here: every parameter's own count."""

from __future__ import annotations

import copy
import io

import lists
import pytest
import torch
import training
from lists import BF16, F32, F64

from apex.optimizers import FusedAdam, _fused_optimizer
from apex.optimizers._plan import ReferencePlan

OPTIONS = dict(lr=0.125, betas=(0.8, 0.9), weight_decay=0.1)
TORCH = {True: torch.optim.AdamW, False: torch.optim.Adam}
SHAPES = ((3,), (4, 5), (2,), (6,))


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def fresh(like):
    return [torch.nn.Parameter(p.detach().clone()) for p in like]


def train(optimizer, params, steps, without=lambda step: ()):
    for step in steps:
        for i, p in enumerate(params):
            p.grad = None
            if i not in without(step):
                (p.grad,) = lists.random(p.dtype, p.device, [p.shape], seed=100 * step + i)
        optimizer.step()


def assert_same(params, others):
    lists.assert_near(params, lists.exact(others), arithmetic=64, smallest=1e-12)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("decoupled", [True, False])
def test_to_torch(variant, decoupled, capturable):
    params = training.parameters(F64, variant.device, SHAPES)
    ours = FusedAdam(params, **OPTIONS, adam_w_mode=decoupled, capturable=capturable)
    train(ours, params, range(3))
    theirs = fresh(params)
    torchs = TORCH[decoupled](theirs, lr=9.0)
    torchs.load_state_dict(through_a_file(ours.state_dict()))
    for group in torchs.param_groups:
        group["lr"] = float(group["lr"])
    train(ours, params, range(3, 6))
    train(torchs, theirs, range(3, 6))
    assert_same(params, theirs)
    assert {int(state["step"]) for state in torchs.state.values()} == {6}


def test_there_and_back(variant):
    """The count that torch's groups keep of ours is out of date by then."""
    params = training.parameters(F64, variant.device, SHAPES)
    ours = FusedAdam(params, **OPTIONS)
    train(ours, params, range(3))
    torchs = torch.optim.AdamW(params, lr=9.0)
    torchs.load_state_dict(ours.state_dict())
    train(torchs, params, range(3, 5))
    assert torchs.param_groups[0]["step"] == 3
    theirs = fresh(params)
    back = FusedAdam(theirs)
    back.load_state_dict(through_a_file(torchs.state_dict()))
    assert back.param_groups[0]["step"] == 5
    train(torchs, params, range(5, 7))
    train(back, theirs, range(5, 7))
    assert_same(theirs, params)


def unequal(params):
    """torch's optimizer after 4 steps, in which the parameters received 4, 2, no and 1 gradients."""
    torchs = torch.optim.AdamW(params, **OPTIONS)
    missing = [(2,), (2, 3), (1, 2, 3), (1, 2, 3)]
    train(torchs, params, range(4), without=lambda step: missing[step])
    return torchs


def counts(optimizer):
    return [int(state["step"]) for state in optimizer.state_dict()["state"].values()]


@pytest.mark.parametrize("how", ["host", "capturable", "found_inf", "master weights"])
def test_each_parameter_has_its_own_count(variant, how):
    dtype = BF16 if how == "master weights" else F64
    params = training.parameters(dtype, variant.device, SHAPES)
    torchs = unequal(params)
    before = counts(torchs)
    assert len(set(before)) == 3
    theirs = fresh(params)
    ours = FusedAdam(theirs, capturable=how == "capturable", master_weights=how == "master weights")
    ours.load_state_dict(through_a_file(torchs.state_dict()))
    assert counts(ours) == before
    if how == "found_inf":  # a step that is skipped on the device counts for none
        ours.found_inf = lists.scalar(1.0, variant.device)
        train(ours, theirs, [9])
        assert counts(ours)[: len(before)] == before
        ours.found_inf.zero_()
    if how == "master weights":
        exact = [torch.nn.Parameter(p.detach().to(F32)) for p in params]
        torchs = torch.optim.AdamW(exact, **OPTIONS)
        torchs.load_state_dict(through_a_file(ours.state_dict()))
        for step in (4, 5):
            train(ours, theirs, [step])
            for p, q in zip(exact, theirs, strict=True):
                p.grad = q.grad.to(F32)
            torchs.step()
        masters = [ours.state[p]["master_param"] for p in theirs]
        lists.assert_near(masters, lists.exact(exact), arithmetic=64, smallest=1e-6)
        return
    train(torchs, params, (4, 5))
    train(ours, theirs, (4, 5))
    assert_same(theirs, params)
    assert sorted(counts(ours)) == sorted(counts(torchs))


@pytest.mark.parametrize("plans", ["plan", "reference plan"])
@pytest.mark.parametrize("capturable", [False, True])
def test_steps_without_any_gradient_count_once(variant, capturable, plans, monkeypatch):
    """Where no kernel runs, none advances the count."""
    if plans == "reference plan":
        variant.mixed = True
        monkeypatch.setattr(
            _fused_optimizer,
            "make_plan",
            lambda names, written, lists, *rest: ReferencePlan(names, lists, *rest),
        )
    params = training.parameters(F64, variant.device, SHAPES)
    torchs = unequal(params)
    before = counts(torchs)
    ours = FusedAdam(fresh(params), capturable=capturable)
    ours.load_state_dict(torchs.state_dict())
    ours.step()
    ours.step()
    assert int(ours.param_groups[0]["step"]) == 6
    assert counts(ours) == [count + 2 for count in before]


@pytest.mark.parametrize("capturable", [False, True])
def test_counts_of_long_runs(variant, capturable):
    """Beyond 2048, where half precision skips integers; float32, as torch's are."""
    params = training.parameters(F64, variant.device, SHAPES)
    saved = unequal(params).state_dict()
    for state in saved["state"].values():
        state["step"] += 4095
    ours = FusedAdam(fresh(params), capturable=capturable)
    ours.load_state_dict(saved)
    steps = [state["step"] for state in ours.state_dict()["state"].values()]
    assert [int(step) for step in steps] == [int(state["step"]) for state in saved["state"].values()]
    assert {step.dtype for step in steps} == {F32}


@pytest.mark.parametrize("copied", ["state_dict", "deepcopy"])
def test_own_counts_travel(variant, copied):
    params = training.parameters(F64, variant.device, SHAPES)
    torchs = unequal(params)
    first = fresh(params)
    ours = FusedAdam(first)
    ours.load_state_dict(torchs.state_dict())
    train(ours, first, [4])
    if copied == "deepcopy":
        again = copy.deepcopy(ours)
        second = again.param_groups[0]["params"]
    else:
        second = fresh(first)
        again = FusedAdam(second)
        again.load_state_dict(through_a_file(ours.state_dict()))
    train(ours, first, [5])
    train(again, second, [5])
    assert counts(again) == counts(ours)
    lists.assert_same_bits(second, first)


def test_public_apex(variant):
    """Its layout has the group's count alone, and reads nothing else of ours."""
    params = training.parameters(F32, variant.device, SHAPES)
    ours = FusedAdam(params, **OPTIONS)
    train(ours, params, range(3))
    saved = ours.state_dict()
    assert saved["param_groups"][0]["step"] == 3
    for state in saved["state"].values():
        del state["step"]
    second = fresh(params)
    again = FusedAdam(second)
    again.load_state_dict(through_a_file(saved))
    train(ours, params, [3])
    train(again, second, [3])
    lists.assert_same_bits(second, params)


def test_a_count_that_was_set_in_a_checkpoint():
    params = training.parameters(F32, "cpu", SHAPES)
    ours = FusedAdam(params, **OPTIONS)
    train(ours, params, range(3))
    saved = ours.state_dict()
    saved["param_groups"][0]["step"] = 0
    again = FusedAdam(fresh(params))
    again.load_state_dict(saved)
    assert again.param_groups[0]["step"] == 0 and set(counts(again)) == {0}
