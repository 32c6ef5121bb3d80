"""update_scale_hysteresis against its rule in Python, by every entrance, on everything that can serve it."""

from __future__ import annotations

import math

import pytest
import torch
from lists import F16, F32, F64, scalar

from apex._loader import bindings

GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 3


def dispatcher(*arguments):
    torch.ops.apex.update_scale_hysteresis(*arguments)


def direct(*arguments):
    module = bindings.load().module
    if module is None:
        pytest.skip(f"no bindings: {bindings.load().reason}")
    module.update_scale_hysteresis(*arguments)


@pytest.fixture(params=[dispatcher, direct], ids=lambda f: f.__name__)
def update(request):
    bindings.load()
    return request.param


class State:
    """A loss scale on a device, and what it must be."""

    def __init__(self, device, scale=1024.0, hysteresis=2, shape=(1,)):
        self.scale = scalar(scale, device).view(shape)
        self.growth, self.left = (scalar(n, device, torch.int32).view(shape) for n in (0, hysteresis))
        self.hysteresis = hysteresis
        self.wanted = [scale, 0, hysteresis]

    def step(self, update, found, growth_factor=GROWTH, backoff_factor=BACKOFF):
        found_inf = scalar(found, self.scale.device).view(self.scale.shape)
        update(
            self.scale,
            self.growth,
            self.left,
            found_inf,
            growth_factor,
            backoff_factor,
            INTERVAL,
            self.hysteresis,
        )
        self._expect(found, growth_factor, backoff_factor)
        assert [self.scale.item(), self.growth.item(), self.left.item()] == self.wanted
        assert found_inf.item() == found or math.isnan(found)

    def _expect(self, found, growth_factor, backoff_factor):
        scale, growth, left = self.wanted
        if found == 0:
            left, growth = self.hysteresis, growth + 1
            if growth == INTERVAL:
                larger = _float32(scale * growth_factor)
                scale, growth = (larger if math.isfinite(larger) else scale), 0
        else:
            left -= 1
            growth = 0
            if left <= 0:
                smaller = _float32(scale * backoff_factor)
                scale = smaller if smaller >= 2.0**-126 else scale
        self.wanted = [scale, growth, left]


def _float32(x):
    return torch.tensor(x, dtype=F64, device="cpu").to(F32).item()


@pytest.mark.parametrize("shape", [(1,), ()], ids=str)
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_runs_of_good_and_bad_steps(variant, update, hysteresis, shape):
    state = State(variant.device, hysteresis=hysteresis, shape=shape)
    for found in map(int, "0000011011100111110000000100"):
        state.step(update, float(found))


def test_hysteresis_of_one_is_torchs_rule(variant, update):
    ours = State(variant.device, hysteresis=1)
    scale, growth = ours.scale.clone(), ours.growth.clone()
    for found in map(int, "000100011000000"):
        ours.step(update, float(found))
        torch._amp_update_scale_(
            scale, growth, scalar(float(found), variant.device), GROWTH, BACKOFF, INTERVAL
        )
        assert torch.equal(scale, ours.scale) and torch.equal(growth, ours.growth)


def test_factors_are_double(variant, update):
    """A factor that float32 does not hold: one rounding, of the product."""
    state = State(variant.device, scale=3.0, hysteresis=1)
    for found in map(int, "0001000101"):
        state.step(update, float(found), 1.1, 0.7)


def test_several_infs_are_one(variant, update):
    """found_inf may be a sum over devices."""
    state = State(variant.device)
    state.step(update, 3.0)
    state.step(update, 2.0)


def test_no_growth_past_float32(variant, update):
    state = State(variant.device, scale=2.0**127)
    for _ in range(INTERVAL):
        state.step(update, 0.0)
    assert state.scale.item() == 2.0**127


def test_endless_overflows_leave_a_scale_to_divide_by(variant, update):
    state = State(variant.device, hysteresis=1)
    for _ in range(1200):
        state.step(update, 1.0)
    assert state.scale.item() == 2.0**-126 and state.scale.reciprocal().isfinite()
    for _ in range(INTERVAL):
        state.step(update, 0.0)
    assert state.scale.item() == 2.0**-125


def test_a_kernel_runs_and_no_host_waits(variant, update):
    if not variant.simt:
        pytest.skip("launches are counted on the executor")
    State(variant.device).step(update, 1.0)
    assert variant.kernels == {"update_scale_hysteresis_f32": 1}


def _bad_inputs(device):
    good = dict(
        current_scale=scalar(1.0, device),
        growth_tracker=scalar(0, device, torch.int32),
        hysteresis_tracker=scalar(2, device, torch.int32),
        found_inf=scalar(0.0, device),
    )
    yield (
        "scale",
        TypeError,
        "current_scale must be a Float",
        good | dict(current_scale=scalar(1, device, F16)),
    )
    yield "growth", TypeError, "growth_tracker must be a Int", good | dict(growth_tracker=scalar(0, device))
    other = torch.zeros(2, dtype=torch.int32, device=device)
    yield "size", ValueError, "must hold one element", good | dict(hysteresis_tracker=other)
    yield "found", TypeError, "found_inf must be a Float", good | dict(found_inf=scalar(0, device, F64))
    yield "device", ValueError, "meta", good | dict(found_inf=scalar(0.0, device).to("meta"))


@pytest.mark.parametrize("what", [case[0] for case in _bad_inputs("cpu")])
def test_bad_input(variant, update, what):
    if not bindings.load().native:
        pytest.skip(f"the reference alone does not check its input: {bindings.load().reason}")
    _, error, words, tensors = next(case for case in _bad_inputs(variant.device) if case[0] == what)
    with pytest.raises(error, match=words):
        update(*tensors.values(), GROWTH, BACKOFF, INTERVAL, 2)
    assert not variant.kernels and not variant.references


def test_opcheck():
    bindings.load()
    tensors = [scalar(1.0, "cpu"), *(scalar(n, "cpu", torch.int32) for n in (0, 2)), scalar(1.0, "cpu")]
    torch.library.opcheck(
        torch.ops.apex.update_scale_hysteresis.default, (*tensors, GROWTH, BACKOFF, INTERVAL, 2)
    )


def _compiled(scale, growth, left, found):
    torch.ops.apex.update_scale_hysteresis(scale, growth, left, found, GROWTH, BACKOFF, INTERVAL, 1)
    return scale * 2


def test_compiled_once_for_every_variant(variant, compiled):
    bindings.load()
    function, compilations = compiled(_compiled)
    state = State(variant.device, hysteresis=1)
    result = function(state.scale, state.growth, state.left, scalar(1.0, variant.device))
    assert state.scale.item() == 512 and result.item() == 1024 and compilations() == 1
