"""What may come between the steps of layers: fake tensors, a state that is loaded, other threads."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from te_common import clean, random  # noqa: F401  a fixture
from torch._subclasses.fake_tensor import FakeTensorMode

import apex.transformer_engine.pytorch as te
from apex.transformer_engine.common.recipe import DelayedScaling
from apex.transformer_engine.pytorch import _scaling, _state

pytestmark = pytest.mark.usefixtures("clean")


def steps(layer, count, x=None):
    x = random(4, 16) if x is None else x
    for _ in range(count):
        with te.fp8_autocast(fp8_recipe=DelayedScaling(amax_history_len=4)):
            layer(x).sum().backward()


@pytest.mark.parametrize("before", [False, True], ids=["first", "behind a step"])
def test_a_pass_with_fake_tensors_leaves_nothing(before):
    """Its numbers are none that a later step may take, and it takes none of an earlier one."""
    _scaling._known_maxima.clear()
    if before:
        steps(te.Linear(16, 16, device="cpu"), 2)
    with FakeTensorMode():
        steps(te.Linear(16, 16, device="cpu"), 3, torch.empty(4, 16, dtype=torch.float32, device="cpu"))
    layer = te.Linear(16, 16, device="cpu")
    steps(layer, 3)  # those of the pass wait for new scales, too
    scaling = layer.fp8_meta["scaling_fwd"]
    assert type(scaling.scale) is torch.Tensor and (scaling.scale[:2] != 1).all()


def test_a_state_that_waits_for_nothing_ends_the_wait():
    layer = te.Linear(16, 16, device="cpu")
    steps(layer, 2)
    with te.fp8_autocast():
        pass
    saved, history = copy.deepcopy(layer.state_dict()), layer.fp8_meta["scaling_fwd"].amax_history.clone()
    steps(layer, 1, 5 * random(4, 16))
    layer.load_state_dict(saved)
    with te.fp8_autocast():
        pass
    assert torch.equal(layer.fp8_meta["scaling_fwd"].amax_history, history) and history.any()


def test_threads_leave_in_any_order():
    """Behind the last of several autocasts layers do not multiply in FP8."""
    inside, left = threading.Event(), threading.Event()

    def second():
        with te.fp8_autocast():
            inside.set()
            assert left.wait(30)

    thread = threading.Thread(target=second)
    with te.fp8_autocast():
        thread.start()
        assert inside.wait(30)
    left.set()
    thread.join(30)
    assert _state.current.depth == 0 and not _state.current.enabled


def test_a_state_that_was_set_outside_is_there_behind_an_autocast():
    manager = te.fp8.FP8GlobalStateManager
    kept = manager.get_fp8_autocast_state()
    manager.set_fp8_autocast_state((True, *kept[1:]))
    with te.fp8_autocast(enabled=False):
        assert not manager.is_fp8_enabled()
    assert manager.is_fp8_enabled()
    manager.set_fp8_autocast_state(kept)
    assert not manager.is_fp8_enabled()
