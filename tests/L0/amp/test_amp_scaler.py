"""LossScaler: unscaling on every variant, and updates on the host and on the device, which must agree."""

from __future__ import annotations

import warnings

import amp_runs as runs
import lists
import pytest
import torch
from lists import BF16, F16, F32, F64

from apex.amp._errors import AmpWarning
from apex.amp.scaler import LossScaler
from apex.optimizers import CombinedAdam, FusedLAMB

DYNAMIC = dict(init_scale=2.0**4, scale_window=3, max_loss_scale=2.0**6)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("dtypes", [(F16, F32), (BF16, F32), (F32, F32), (F16, F16), (F64, F64)], ids=str)
def test_unscale(variant, dtypes, on_device):
    grads = lists.random(dtypes[0], variant.device, ((3,), (0,), (5, 7)))
    masters = lists.empties(grads, dtypes[1])
    scaler = LossScaler("dynamic", init_scale=2.0**7)
    if on_device:
        scaler._to_device(variant.device)
    scaler.unscale(grads, masters, None)
    lists.assert_near(masters, [g / 128 for g in lists.exact(grads)])
    assert (scaler._on_device is not None) == on_device and scaler.update_scale() is False


@pytest.mark.parametrize("on_device", [False, True])
def test_unscale_with_stashed(variant, on_device):
    grads, stashed = (lists.random(F16, variant.device, ((3,), (5, 7)), seed=s) for s in (1, 2))
    masters = [s.float() for s in stashed]
    scaler = LossScaler("dynamic", init_scale=2.0**7)
    if on_device:
        scaler._to_device(variant.device)
    scaler.unscale_with_stashed(grads, masters, masters)
    expected = [g / 128 + s for g, s in zip(*map(lists.exact, (grads, stashed)), strict=True)]
    lists.assert_near(masters, expected, arithmetic=4, smallest=1e-6)
    scaler.unscale_with_stashed(grads, masters, masters, (4.0, 2.0, 1.0))
    expected = [g / 4 + e / 2 for g, e in zip(lists.exact(grads), expected, strict=True)]
    lists.assert_near(masters, expected, arithmetic=8, smallest=2e-6)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)
def test_overflow(variant, dtype, bad):
    grads = lists.random(dtype, variant.device, ((3,), (5,)))
    grads[1][4] = bad
    for update in ("update_scale", "update_scale_on_device"):
        scaler = LossScaler("dynamic", **DYNAMIC)
        scaler.unscale(grads, lists.clones(grads), None)
        assert bool(getattr(scaler, update)())
        assert scaler.loss_scale() == 8.0
        scaler.clear_overflow_state()
        scaler.unscale_with_stashed(grads, lists.clones(grads), lists.clones(grads))
        assert bool(getattr(scaler, update)()) and scaler.loss_scale() == 4.0


def test_a_static_scale_never_skips(variant):
    scaler = LossScaler(8.0, scale_window=1)
    grads = [torch.full((3,), float("inf"), device=variant.device, dtype=F32)]
    scaler.unscale(grads, grads, None)
    assert scaler.update_scale() is False and scaler.loss_scale() == 8.0


def test_scale_one_leaves_gradients_alone():
    """Nothing is read or written: a gradient may be anything, and there are no masters to write."""
    values = [float("inf"), float("nan"), 1.5]
    grads, scaler = [torch.tensor(values, dtype=F32, device="cpu")], LossScaler(1.0)
    version = grads[0]._version
    scaler.unscale(grads, None, None, models_are_masters=True)
    assert str(grads[0].tolist()) == str(values) and grads[0]._version == version
    assert not scaler._flags and scaler.update_scale() is False and scaler.loss_scale() == 1.0


@pytest.mark.filterwarnings("ignore:gradients overflowed until")
@pytest.mark.parametrize("minimum", [None, 0, 4.0, 2.0**5])
def test_host_and_device_agree(minimum):
    """Growth, ceiling, back-off and floor; the floor counts on back-off only, as in public apex."""
    host = LossScaler("dynamic", **DYNAMIC, min_loss_scale=minimum)
    device = LossScaler("dynamic", **DYNAMIC, min_loss_scale=minimum)
    generator = torch.Generator().manual_seed(0)
    for step in range(60):
        bad = float(torch.rand((), generator=generator, dtype=F32, device="cpu")) < (
            0.6 if 20 < step < 30 else 0.08
        )
        grads = [torch.tensor([float("inf") if bad else 1.0], dtype=F32, device="cpu")]
        decided = []
        for scaler, update in ((host, "update_scale"), (device, "update_scale_on_device")):
            scaler.clear_overflow_state()
            scaler.unscale(grads, lists.clones(grads), None)
            decided.append(bool(getattr(scaler, update)()))
        assert decided == [bad, bad]
        if step % 7 == 0:  # reading moves the scale to the host; it goes back by itself
            assert host.loss_scale() == device.loss_scale() and host._unskipped == device._unskipped
    assert host.loss_scale() == device.loss_scale()


FLOORS = [(dict(), 2.0**-24), (dict(min_loss_scale=0), 2.0**-24), (dict(min_loss_scale=4.0), 4.0)]
FLOORS += [(dict(init_scale=2.0**-30), 2.0**-30), (dict(min_loss_scale=2.0**-40), 2.0**-40)]
FLOORS += [(dict(min_loss_scale=1e-300), 2.0**-126)]


@pytest.mark.parametrize("update", ["update_scale", "update_scale_on_device"])
@pytest.mark.parametrize(("options", "floor"), FLOORS, ids=str)
def test_endless_overflows_leave_a_positive_scale(update, options, floor):
    """1,200 in a row are enough for a double to become 0."""
    scaler = LossScaler("dynamic", **{**DYNAMIC, **options})
    bad = [torch.full((1,), float("inf"), dtype=F32, device="cpu")]
    seen = update == "update_scale" or scaler.loss_scale() > floor  # the host sees the device's scale sink
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(1200):
            scaler.clear_overflow_state()
            scaler.unscale(bad, lists.clones(bad), None)
            assert bool(getattr(scaler, update)())
            scaler.tell_of_overflow(0)
        assert scaler.loss_scale() == floor
    assert [w.category for w in told] == [AmpWarning] * seen
    assert all("its floor; steps are skipped" in str(w.message) for w in told)
    good = [torch.full((1,), 1.0, dtype=F32, device="cpu")]
    for doublings in (1, 2):
        unscaled = lists.clones(good)
        for _ in range(DYNAMIC["scale_window"]):
            scaler.clear_overflow_state()
            scaler.unscale(good, unscaled, None)
            assert not bool(getattr(scaler, update)())
        assert scaler.loss_scale() == floor * 2**doublings
    assert unscaled[0].isfinite()


@pytest.mark.filterwarnings("ignore:gradients overflowed until")
@pytest.mark.parametrize("update", ["update_scale", "update_scale_on_device"])
def test_a_scale_that_was_set_below_the_floor_stays(update):
    scaler = LossScaler("dynamic", **DYNAMIC)
    scaler._loss_scale = 2.0**-40
    bad = [torch.full((1,), float("inf"), dtype=F32, device="cpu")]
    scaler.unscale(bad, lists.clones(bad), None)
    getattr(scaler, update)()
    assert scaler.loss_scale() == 2.0**-40


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", ["sgd", "FusedAdam", "FusedLAMB", "combined"])
def test_training_survives_endless_overflows(name, level):
    """Parameters stay what they are; finite gradients train again, and the scale doubles."""
    model = runs.plain()
    kind = {"FusedLAMB": FusedLAMB, "combined": CombinedAdam}.get(name)
    optimizer = kind(model.parameters(), lr=0.01) if kind else runs.OPTIMIZERS[name](model.parameters())
    own = name == "combined"
    model, optimizer = runs.initialize(
        model, optimizer, opt_level=level, num_losses=2, scale_window=2, combine_grad=own
    )
    runs.train(model, optimizer, 1)
    before = runs.values(model), runs.values(optimizer)
    with pytest.warns(AmpWarning, match="its floor") as told:
        for _ in range(1200):
            runs.overflow(model, optimizer)
            optimizer.step()
        assert runs.scaler().loss_scale() == 2.0**-24
    assert len(told) == 1 and runs.scaler(1).loss_scale() == 2.0**16
    assert runs.equal(runs.values(model), before[0]) and runs.equal(runs.values(optimizer), before[1])
    runs.train(model, optimizer, 4)
    assert runs.scaler().loss_scale() == 2.0**-22
    if level == "O1":  # gradients in float16 are 0 at this scale
        assert not runs.equal(runs.values(model), before[0])
    runs.backward(runs.loss_of(model) * float("inf"), optimizer, loss_id=1)
    optimizer.step()
    assert runs.scaler(1).loss_scale() == 2.0**15


def test_the_ceiling_holds_from_the_start():
    assert LossScaler("dynamic", init_scale=2.0**16, max_loss_scale=2.0**10).loss_scale() == 2.0**10


def test_what_user_code_touches():
    """BERT scripts check for overflow themselves, through these names."""
    scaler = LossScaler("dynamic")
    own = torch.ones(1, dtype=torch.int32, device="cpu")
    old, scaler._overflow_buf = scaler._overflow_buf, own
    assert scaler.update_scale() is True
    scaler._overflow_buf = old
    scaler.clear_overflow_state()
    assert scaler.update_scale() is False and scaler._unskipped == 1
    scaler._loss_scale = 4.0
    assert scaler.loss_scale() == 4.0 and scaler.dynamic and scaler._has_overflow is False


@pytest.mark.parametrize("bad", [False, True])
def test_python_fallbacks(bad):
    scaler = LossScaler("dynamic", init_scale=4.0)
    grads = [
        torch.tensor([2.0, float("nan") if bad else 4.0], dtype=F16, device="cpu"),
        torch.ones(1, dtype=F16, device="cpu"),
    ]
    masters, stashed = (
        [torch.empty(2, dtype=F32, device="cpu"), torch.empty(1, dtype=F32, device="cpu")],
        [torch.ones(2, dtype=F32, device="cpu"), torch.ones(1, dtype=F32, device="cpu")],
    )
    scaler.unscale_python(grads, masters, 4.0)
    if not bad:
        assert masters[0].tolist() == [0.5, 1.0] and masters[1].item() == 0.25
    scaler.unscale_with_stashed_python(grads, stashed, masters, 0.25, 1.0)
    if not bad:
        assert masters[0].tolist() == [1.5, 2.0]
    assert scaler.update_scale() is bad


def test_sparse_gradients():
    embedding = torch.nn.Embedding(10, 3, sparse=True, dtype=F32, device="cpu")
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    before = embedding.weight.detach().clone()
    model, optimizer = runs.initialize(embedding, optimizer, opt_level="O1")
    for step in range(2):
        runs.backward(model(torch.tensor([1, 1, 4], device="cpu", dtype=torch.int64)).sum(), optimizer)
        if step == 0:
            assert model.weight.grad.is_sparse
    assert torch.equal(
        model.weight.grad.to_dense()[:, 0],
        torch.tensor([0.0, 4, 0, 0, 2, 0, 0, 0, 0, 0], dtype=F32, device="cpu"),
    )
    optimizer.step()
    assert torch.equal(model.weight[1], before[1] - 4)
    optimizer.zero_grad()
    runs.backward(model(torch.tensor([1], device="cpu", dtype=torch.int64)).sum() * float("inf"), optimizer)
    before = runs.values(model)
    optimizer.step()
    assert runs.equal(runs.values(model), before)
