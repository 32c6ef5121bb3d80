"""Where the histories of layers lie: one behind the other, yet each by itself for whoever copies, saves or loads it."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref

import pytest
import torch
from te_common import clean, random  # noqa: F401  a fixture
from torch._subclasses.fake_tensor import FakeTensorMode

import apex.transformer_engine.pytorch as te
from apex.transformer_engine.common.recipe import DelayedScaling
from apex.transformer_engine.pytorch import _history, _scaling
from apex.transformer_engine.pytorch._scaling import Scaling

pytestmark = pytest.mark.usefixtures("clean")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """No block of another test is being filled."""
    monkeypatch.setattr(_history, "_open", weakref.WeakValueDictionary())


def span(scaling):
    """(where its memory begins, where it ends)"""
    rows = scaling._rows
    assert rows.stride() == (1, rows.shape[0])
    return rows.data_ptr(), rows.data_ptr() + rows.nbytes


def states(layer):
    return [layer.fp8_meta[part] for part in ("scaling_fwd", "scaling_bwd")]


def step(layer, length=4):
    with te.fp8_autocast(fp8_recipe=DelayedScaling(amax_history_len=length)):
        layer(random(4, 16)).sum().backward()


def test_one_behind_the_other_and_each_by_itself():
    layers = [te.Linear(16, 16, device="cpu") for _ in range(3)]
    spans = [span(scaling) for layer in layers for scaling in states(layer)]
    assert all(before[1] == after[0] for before, after in zip(spans, spans[1:], strict=False))
    for scaling in states(layers[0]):
        assert scaling._rows.untyped_storage().nbytes() == scaling._rows.nbytes
        assert scaling.amax_history.eq(0).all() and scaling.amax_history.shape == (
            1024,
            scaling.scale.numel(),
        )
    step(layers[0])
    version, others = states(layers[1])[0]._rows._version, [s._rows.clone() for s in states(layers[1])]
    step(layers[0])
    assert states(layers[1])[0]._rows._version == version
    assert all(torch.equal(s._rows, was) for s, was in zip(states(layers[1]), others, strict=True))


def pickled(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    assert len(file.getvalue()) < 2 * 4 * 1024 * 5 + 2**14  # of no other layer
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("make", [copy.deepcopy, pickled], ids=["copied", "pickled"])
def test_copies_lie_so_too_and_write_nothing_of_the_first(make):
    layer = te.Linear(16, 16, device="cpu")
    step(layer)
    step(layer)
    many = [make(layer) for _ in range(3)]
    for scaling, first in zip(states(many[1]), states(layer), strict=True):
        assert torch.equal(scaling._rows, first._rows) and first.amax_history.any()
    spans = sorted(span(scaling) for each in (layer, *many) for scaling in states(each))
    assert all(before[1] <= after[0] for before, after in zip(spans, spans[1:], strict=False))
    assert spans[-1][1] - spans[0][0] == 4 * (1024 * 4 * 5)  # no gap
    with te.fp8_autocast(fp8_recipe=DelayedScaling(amax_history_len=4)):
        pass  # nothing waits for new scales any more
    before = [s._rows.clone() for s in states(layer)]
    step(many[0])
    assert all(torch.equal(s._rows, was) for s, was in zip(states(layer), before, strict=True))


def test_longer_histories_keep_what_they_hold():
    layer = te.Linear(16, 16, device="cpu")
    step(layer, 3)
    newest = states(layer)[0].amax_history.clone()
    step(layer, 2000)  # longer than what was there
    history = states(layer)[0].amax_history
    assert history.shape[0] == 2000 and span(states(layer)[0])
    assert torch.equal(history[2], newest[0]) and not history[1].any() and not history[3:].any()


def test_memory_goes_with_the_layers():
    """Also where the next model is made before the last one is gone."""
    _history._open[CPU, 0] = block = _history._Block(CPU)
    known = weakref.ref(block)
    del block
    gc.collect()
    assert known() is None and not _history._open
    seen, layer = weakref.WeakSet(), None
    for _ in range(200):
        layer = te.Linear(16, 16, device="cpu")
        seen.add(_history._open[CPU, 0])
    assert len(seen) <= 2
    assert len([s for s in states(layer) if span(s)]) == 2
    del layer
    gc.collect()
    assert not seen and not _history._open


def test_threads_share_no_memory():
    made, start = [], threading.Barrier(4)

    def make():
        start.wait(30)
        for _ in range(40):
            made.append(Scaling(3, 1024, CPU))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    spans = sorted(map(span, made))
    assert len(spans) == 160
    assert all(before[1] <= after[0] for before, after in zip(spans, spans[1:], strict=False))


def test_what_lies_alone():
    """What has no numbers, and what is larger than a block."""
    with FakeTensorMode():
        assert not _history.zeros(4, 3, CPU)[1][1]
    rows, (_, block) = _history.zeros(2**18, 3, CPU)
    assert block is None and rows.shape == (2**18, 3) and not rows.any()
    assert _history.zeros(4, 3, torch.device("meta"))[0].is_meta
    with torch.inference_mode():
        rows, _ = _history.zeros(4, 3, CPU)
    assert not rows.is_inference()


def test_a_state_that_is_loaded_lies_where_a_graph_knows_it():
    """What replays writes and reads the memory that it was captured with."""
    layers = [te.Linear(16, 16, device="cpu") for _ in range(2)]
    for layer in layers:
        step(layer)
        step(layer, 4)
    with te.fp8_autocast():
        pass
    saved = copy.deepcopy(layers[0].state_dict())
    wanted = [(s.scale.clone(), s.scale_inv.clone(), s.amax_history.clone()) for s in states(layers[0])]
    step(layers[0])
    with te.fp8_autocast():
        pass
    every = [s for layer in layers for s in states(layer)]
    _scaling.fix(every[::-1])
    assert all(
        a.scale.data_ptr() + a.scale.nbytes == b.scale.data_ptr()
        for a, b in zip(every, every[1:], strict=False)
    )
    places = [(s.scale.data_ptr(), s.scale_inv.data_ptr(), s.amax_history.data_ptr()) for s in every]
    layers[0].load_state_dict(saved)
    assert places == [(s.scale.data_ptr(), s.scale_inv.data_ptr(), s.amax_history.data_ptr()) for s in every]
    for scaling, numbers in zip(states(layers[0]), wanted, strict=True):
        held = scaling.scale, scaling.scale_inv, scaling.amax_history
        assert all(map(torch.equal, held, numbers))
