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


def given(states, device, lay=lambda histories, scales: (histories, scales)):
    """(histories, scales, maxima, new scales, new inverses)"""
    histories, scales, _, maxima = zip(*(state.tensors(device) for state in states), strict=True)
    maxima = torch.cat(maxima)
    new, inverse = torch.full_like(maxima, 7.0), torch.full_like(maxima, 7.0)
    return *map(list, lay(histories, scales)), maxima, new, inverse


def upright(histories, scales):
    """Each column whole, in memory of its own."""
    return [history.t().contiguous().t() for history in histories], scales


def roomy(histories, scales):
    """Upright, with place for more rows."""
    made = [torch.full((h.shape[1], h.shape[0] + 5), 9.0, dtype=F32, device=h.device) for h in histories]
    return [m[:, : len(h)].t().copy_(h) for m, h in zip(made, histories, strict=True)], scales


def together(histories, scales):
    """Upright, one behind the other, and scales, too."""
    sizes = [scale.numel() for scale in scales]
    columns = torch.cat([history.t() for history in histories])
    return [part.t() for part in columns.split(sizes)], torch.cat(scales).split(sizes)


LAYOUTS = pytest.mark.parametrize(
    "lay", [lambda *given: given, upright, roomy, together], ids=["rows", "upright", "roomy", "together"]
)


def check(states, device, margin=0, most_recent=False, lay=lambda *given: given):
    histories, scales, maxima, scale, inverse = given(states, device, lay)
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


@LAYOUTS
@pytest.mark.parametrize("most_recent", [False, True], ids=["max", "most_recent"])
@pytest.mark.parametrize("rows", [1, 2, 70, 1024])
def test_steps(variant, rows, most_recent, lay):
    """Columns fewer and more than a block takes, none among them."""
    check([State(rows, n, n) for n in (3, 2, 0, 20, 8, 1, 0)], variant.device, 1, most_recent, lay)


@pytest.mark.parametrize("lay, launches", [(upright, 3), (together, 1)], ids=["apart", "together"])
def test_any_number_is_a_launch_where_they_lie_together(variant, lay, launches):
    """Apart, 120 are one."""
    check([State(3, 1 + n % 4, n) for n in range(2 * 120 + 1)], variant.device, lay=lay)
    if variant.simt:
        assert variant.kernels["fp8_multi_update_scales_f32"] == launches


def test_what_does_not_lie_together_is_not_one(variant):
    """Neighbours in memory whose scales are none, others with other pitches, and the same in another order."""
    states = [State(3, n, n) for n in (2, 3, 2, 4)]

    def lay(histories, scales):
        histories, _ = together(histories, scales)
        return histories, scales

    check(states, variant.device, lay=lay)

    def turned(histories, scales):
        histories, scales = together(histories[::-1], scales[::-1])
        return histories[::-1], scales[::-1]

    check(states, variant.device, lay=turned)

    def short(
        histories, scales
    ):  # the second lies right behind the first one's last row, but not its last column
        memory = torch.zeros(2 * 8 + 3 * 3, dtype=F32, device=histories[0].device)
        first = memory[:16].view(2, 8)[:, :3].t().copy_(histories[0])
        second = memory[16:].view(3, 3).t().copy_(histories[1])
        return (first, second), torch.cat(scales).split([2, 3])

    check(states[:2], variant.device, lay=short)


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
    wide = torch.zeros(6, 6, dtype=F32, device="cpu")
    for error, text, arguments in [
        (ValueError, "2 histories, 1 scales", (histories, scales[:1], *rest)),
        (TypeError, r"amax_histories\[0\] must be float32", ([first.double(), histories[1]], scales, *rest)),
        (ValueError, "at least one row", ([first[:0], histories[1]], scales, *rest)),
        (ValueError, "have 4 and 3 rows", ([first, histories[1][:3]], scales, *rest)),
        (ValueError, r"amax_histories\[1\] must be contiguous", ([first, first[:, :2]], scales, *rest)),
        (ValueError, r"amax_histories\[1\] must be contiguous", ([first, first.repeat(2, 1)[::2, :2]], scales, *rest)),
        (ValueError, "share memory: both are written", ([wide.t()[:4], wide.t()[2:6]], [scales[0]] * 2, *twice)),
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
