"""Delayed scaling's update of many histories: as fp8_update_scales of each, on everything that can serve it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lists import F32
from test_fp8_update_scales import State
from torch.library import opcheck

from apex import _fp8
from apex._loader import bindings

bindings.load()
op = torch.ops.apex.fp8_multi_update_scales


def given(states, device):
    """(histories, scales, maxima, new scales, new inverses)"""
    histories, scales, _, maxima = zip(*(state.tensors(device) for state in states), strict=True)
    maxima = torch.cat(maxima)
    return list(histories), list(scales), maxima, torch.full_like(maxima, 7.0), torch.full_like(maxima, 7.0)


def check(states, device, margin=0, most_recent=False):
    histories, scales, maxima, scale, inverse = given(states, device)
    before = [old.clone() for old in scales]
    versions = [t._version for t in (*histories, scale, inverse)]
    op(maxima, histories, scales, scale, inverse, float(margin), most_recent)
    assert all(t._version > v for t, v in zip((*histories, scale, inverse), versions, strict=True))
    for state in states:
        state.step(margin, most_recent, False)
    for history, state in zip(histories, states, strict=True):
        np.testing.assert_array_equal(history.cpu().numpy(), state.history)
    for found, name in ((scale, "scale"), (inverse, "inverse")):
        wanted = np.concatenate([getattr(state, name) for state in states])
        np.testing.assert_array_equal(found.cpu().numpy(), wanted)
    assert all(torch.equal(old, was) for old, was in zip(scales, before, strict=True))


@pytest.mark.parametrize("most_recent", [False, True], ids=["max", "most_recent"])
@pytest.mark.parametrize("rows", [1, 2, 70, 1024])
def test_steps(variant, rows, most_recent):
    """Columns fewer and more than a block takes, none among them."""
    check([State(rows, n, n) for n in (3, 2, 0, 20, 8, 1, 0)], variant.device, 1, most_recent)


def test_more_than_a_launch_takes(variant):
    check([State(3, 1 + n % 4, n) for n in range(2 * 160 + 1)], variant.device)


def test_face(variant):
    states = [State(4, n) for n in (3, 2)]
    histories, scales, maxima, *_ = given(states, variant.device)
    scale, inverse = _fp8.multi_update_scales(histories, scales, maxima, 2, "most_recent")
    for state in states:
        state.step(2, True, False)
    np.testing.assert_array_equal(scale.cpu().numpy(), np.concatenate([state.scale for state in states]))
    assert torch.equal(inverse, torch.ones_like(scale) / scale)
    none = torch.empty(0, dtype=F32, device=variant.device)
    op(none, [], [], none, none)
    with pytest.raises(ValueError, match="the algorithm must be"):
        _fp8.multi_update_scales(histories, scales, maxima, algorithm="least")


def test_opcheck_and_refusals():
    histories, scales, maxima, scale, inverse = given([State(4, 6), State(4, 2)], "cpu")
    opcheck(op, (maxima, histories, scales, scale, inverse, 1.0, True))
    rest = maxima, scale, inverse  # told here in the order (histories, scales, maxima, ...)
    first, twice = histories[0], [tensor.repeat(2)[:12] for tensor in rest]
    for error, text, arguments in [
        (ValueError, "2 histories, 1 scales", (histories, scales[:1], *rest)),
        (TypeError, r"amax_histories\[0\] must be float32", ([first.double(), histories[1]], scales, *rest)),
        (ValueError, "at least one row", ([first[:0], histories[1]], scales, *rest)),
        (ValueError, "have 4 and 3 rows", ([first, histories[1][:3]], scales, *rest)),
        (ValueError, r"amax_histories\[1\] must be contiguous", ([first, first[:, :2]], scales, *rest)),
        (TypeError, r"scales\[1\] must be float32", (histories, [scales[0], scales[1].half()], *rest)),
        (ValueError, r"scales\[1\] has shape", (histories, [scales[0], scales[0]], *rest)),
        (ValueError, "fp8_max has shape", (histories, scales, maxima[:7], scale, inverse)),
        (ValueError, "scale_inv must be contiguous", (histories, scales, maxima, scale, inverse.repeat(2)[::2])),
        (ValueError, "share memory: both are written", (histories, scales, maxima, scale, scale)),
        (ValueError, "share memory: both are written", ([first, first], [scales[0]] * 2, *twice)),
        (ValueError, "meta", (histories, scales, maxima.to("meta"), scale, inverse)),
    ]:  # fmt: skip
        with pytest.raises(error, match=text):
            op(arguments[2], *arguments[:2], *arguments[3:])
