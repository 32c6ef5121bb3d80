"""Delayed scaling's update against its rule in numpy, on everything that can serve it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lists import F32
from torch.library import opcheck

from apex import _fp8
from apex._loader import bindings

bindings.load()
op = torch.ops.apex.fp8_update_scales


class State:
    """Histories, scales and their inverses in numpy; `tensors` gives them on a device."""

    def __init__(self, rows, columns, seed=0):
        rng = np.random.default_rng(seed)
        self.history = np.exp(rng.standard_normal((rows, columns)) * 4).astype(np.float32)
        self.scale = rng.random(columns, np.float32) + 1
        self.inverse = np.float32(1) / self.scale
        self.maximum = np.where(np.arange(columns) % 3 == 2, 57344, 448).astype(np.float32)
        self.reduced = (self.history[0] * 3).astype(np.float32)
        odd = [0.0, np.inf, np.nan, 1e-42]
        for i, value in enumerate(odd[: max(0, columns - 1)]):
            self.history[:, i], self.reduced[i] = value, value

    def tensors(self, device):
        held = (self.history, self.scale, self.inverse, self.maximum)
        return [torch.from_numpy(a.copy()).to(device) for a in held]

    def step(self, margin, most_recent, reduced):
        newest = self.reduced.copy() if reduced else self.history[0].copy()
        rows = np.concatenate((newest[None], self.history[1:]))
        amax = newest if most_recent else rows.max(0)
        with np.errstate(all="ignore"):
            found = np.minimum(self.maximum / amax * np.float32(2.0**-margin), np.finfo(np.float32).max)
        self.scale = np.where((amax > 0) & np.isfinite(amax), found, self.scale).astype(np.float32)
        self.inverse = np.float32(1) / self.scale
        self.history = np.roll(rows, -1, 0)
        self.history[0] = 0


@pytest.mark.parametrize("upright", [False, True], ids=["rows", "upright"])
@pytest.mark.parametrize("most_recent", [False, True], ids=["max", "most_recent"])
@pytest.mark.parametrize("reduced", [False, True], ids=["alone", "reduced"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (2, 8), (16, 13), (1024, 9), (1030, 20), (3, 0)], ids=str)
def test_steps(variant, shape, most_recent, reduced, upright):
    """Three in a row: amax 0, infinite and NaN keep the scale; a quotient that overflows is the largest float32."""
    state = State(*shape)
    history, scale, inverse, maximum = state.tensors(variant.device)
    if upright:
        history = history.t().contiguous().t()
    for margin in (0, 2, 0):
        given = torch.from_numpy(state.reduced.copy()).to(variant.device) if reduced else None
        state.step(margin, most_recent, reduced)
        versions = [t._version for t in (history, scale, inverse)]
        op(history, scale, inverse, maximum, float(margin), most_recent, given)
        assert all(t._version > v for t, v in zip((history, scale, inverse), versions, strict=True))
        for found, wanted in ((history, state.history), (scale, state.scale), (inverse, state.inverse)):
            np.testing.assert_array_equal(found.cpu().numpy(), wanted)


def test_states_that_are_views(variant):
    """Rows of a larger history, scales in the middle of others: what lies beside them stays."""
    state = State(5, 6)
    whole = torch.full((5, 16), 7.0, dtype=F32, device=variant.device)
    numbers = torch.full((3, 12), 9.0, dtype=F32, device=variant.device)
    history, scale, inverse = whole[:, 4:10], numbers[0, 3:9], numbers[1, 3:9]
    *written, maximum = state.tensors(variant.device)
    for view, value in zip((history, scale, inverse), written, strict=True):
        view.copy_(value)
    _fp8.update_scales(history, scale, inverse, maximum, 1)
    state.step(1, False, False)
    np.testing.assert_array_equal(history.cpu().numpy(), state.history)
    np.testing.assert_array_equal(scale.cpu().numpy(), state.scale)
    assert whole[:, :4].eq(7).all() and whole[:, 10:].eq(7).all()
    assert numbers[2].eq(9).all() and numbers[:, :3].eq(9).all() and numbers[:, 9:].eq(9).all()


def test_opcheck_and_refusals():
    history, scale, inverse, maximum = State(4, 6).tensors("cpu")
    opcheck(op, (history, scale, inverse, maximum, 1.0, True, scale.clone()))
    for error, text, arguments in [
        (TypeError, "amax_history must be float32", (history.double(), scale, inverse, maximum)),
        (ValueError, "at least one row", (history[:0], scale, inverse, maximum)),
        (ValueError, "at least one row", (history[0], scale, inverse, maximum)),
        (
            ValueError,
            "rows of amax_history must be contiguous",
            (history.repeat(2, 2)[::2, ::2], scale, inverse, maximum),
        ),
        (ValueError, "overlaps itself", (history[:1].expand(4, 6), scale, inverse, maximum)),
        (TypeError, "scale must be float32", (history, scale.half(), inverse, maximum)),
        (ValueError, "scale_inv has shape", (history, scale, inverse[:5], maximum)),
        (ValueError, "fp8_max must be contiguous", (history, scale, inverse, maximum.repeat(2)[::2])),
        (ValueError, "reduced has shape", (history, scale, inverse, maximum, 0.0, False, history)),
        (ValueError, "meta", (history, scale, inverse, maximum.to("meta"))),
    ]:
        with pytest.raises(error, match=text):
            op(*arguments)
    with pytest.raises(ValueError, match="the algorithm must be"):
        _fp8.update_scales(history, scale, inverse, maximum, algorithm="least")
