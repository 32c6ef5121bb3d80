"""What may come between the steps of layers: fake tensors, a state that is loaded, other threads."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch
from te_common import clean, random  # noqa: F401  a fixture
from torch._subclasses.fake_tensor import FakeTensorMode

import apex.transformer_engine.pytorch as te
from apex.transformer_engine.common.recipe import DelayedScaling
from apex.transformer_engine.pytorch import _state

pytestmark = pytest.mark.usefixtures("clean")


def steps(layer, count, x=None):
    x = random(4, 16) if x is None else x
    for _ in range(count):
        with te.fp8_autocast(fp8_recipe=DelayedScaling(amax_history_len=4)):
            layer(x).sum().backward()


@pytest.mark.parametrize("before", [False, True], ids=["first", "behind a step"])
def test_a_pass_with_fake_tensors_leaves_nothing(before):
    """Its numbers are none that a later step may take, and it takes none of an earlier one."""
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


# ---- functions of a recipe that raise, once ------------------------------------------------------------------------


class Fails:
    """A function of a recipe that gives `bad` at its `at`th call, or raises, and is right before and behind."""

    def __init__(self, right, at, bad=None):
        self.right, self.left, self.bad = right, at, bad

    def __call__(self, *arguments):
        self.left -= 1
        if self.left != 0:
            return self.right(*arguments)
        if self.bad is None:
            raise OSError("no scale today")
        return self.bad


MAXIMUM = {"amax_compute_algo": lambda history: history.amax(0)}
RATIO = {"scaling_factor_compute_algo": lambda amax, old, top, of: torch.where(amax > 0, top / amax, old)}
WRONG = torch.ones(7, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(
    "bad, error, text",
    [(None, OSError, "no scale today"), (WRONG, ValueError, r"of shape \[3\]"), (2.0, ValueError, "not 2.0")],
    ids=["raises", "shape", "type"],
)
@pytest.mark.parametrize("function", [MAXIMUM, RATIO], ids=["amax", "scale"])
def test_an_update_that_fails_is_made_once_at_the_next_autocast(function, bad, error, text):
    """Calls 1 and 2 are the first layer's, 3 the second's forward pass, whose scales fail."""
    ((name, right),) = function.items()
    layers = [te.Linear(16, 16, device="cpu") for _ in range(2)]
    wanted = [copy.deepcopy(layer) for layer in layers]
    of = DelayedScaling(amax_history_len=4, **{name: Fails(right, 3, bad)})
    together(layers, of)
    before = [history.clone() for history in histories(layers)]
    with pytest.raises(error, match=text), te.fp8_autocast(fp8_recipe=of):
        pass
    assert all(map(torch.equal, histories(layers), before))
    assert all((layer.fp8_meta["scaling_fwd"].scale == 1).all() for layer in layers)
    for _ in range(2):  # the second makes none
        with te.fp8_autocast(fp8_recipe=of):
            pass
    together(wanted, DelayedScaling(amax_history_len=4, **function))
    with te.fp8_autocast():
        pass
    assert all(map(torch.equal, histories(layers), histories(wanted)))
    for found, same in zip(layers, wanted, strict=True):
        for part in ("scaling_fwd", "scaling_bwd"):
            scale = found.fp8_meta[part].scale
            assert torch.equal(scale, same.fp8_meta[part].scale) and (scale[:1] != 1).all()


def together(layers, recipe):
    with te.fp8_autocast(fp8_recipe=recipe):
        for layer in layers:
            layer(random(4, 16)).sum().backward()


def test_recipes_whose_scales_are_made_before_the_fault_are_not_made_again():
    """Each recipe is updated by itself: that of the first layer is over when the other's function raises."""
    first, second = (te.Linear(16, 16, device="cpu") for _ in range(2))
    good, bad = DelayedScaling(amax_history_len=4), DelayedScaling(amax_history_len=4, **MAXIMUM)
    bad.amax_compute_algo = Fails(MAXIMUM["amax_compute_algo"], 1)
    with te.fp8_autocast(fp8_recipe=good):
        first(random(4, 16)).sum().backward()
        with te.fp8_autocast(fp8_recipe=bad):
            second(random(4, 16)).sum().backward()
    with pytest.raises(OSError, match="no scale today"), te.fp8_autocast(fp8_recipe=good):
        pass
    moved = first.fp8_meta["scaling_fwd"].amax_history.clone()
    assert moved[-1].any() and not moved[0].any()
    with te.fp8_autocast(fp8_recipe=good):
        pass
    assert torch.equal(first.fp8_meta["scaling_fwd"].amax_history, moved)
    assert second.fp8_meta["scaling_fwd"].amax_history[-1].any()


def histories(layers):
    return [layer.fp8_meta[part].amax_history for layer in layers for part in ("scaling_fwd", "scaling_bwd")]


def test_nothing_of_a_model_that_is_gone_stays():
    """However many sets of layers made new scales together: no tensor is left of them."""

    def live():
        gc.collect()
        return sum(1 for thing in gc.get_objects() if type(thing) is torch.Tensor)

    def train(count):
        layers = [te.Linear(16, 16, device="cpu") for _ in range(count)]
        for _ in range(2):
            with te.fp8_autocast(fp8_recipe=DelayedScaling(amax_history_len=4)):
                for layer in layers:
                    layer(random(4, 16)).sum().backward()
        with te.fp8_autocast():
            pass

    train(1)
    before = live()
    for count in range(2, 6):
        train(count)
    assert live() == before
