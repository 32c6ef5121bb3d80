"""reduce_bn kernels against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import numpy as np
import pytest

from simt import channels


@pytest.mark.parametrize("case", channels.REDUCTIONS, ids=str)
def test_values(device, case):
    t = channels.Tensors(device, case)
    grads = {name: t.empty(case.channels, case.math) for name in ("grad_weight", "grad_bias")}
    found = channels.reduce(
        t, "reduce_bn", grad_output=t.put("dy", case.dtype, case.offset), **t.statistics(), **grads
    )
    of_dy = t.dy.sum((0, 2))
    of_dy_xmu = (t.dy * (t.x - t.spread(t.mean))).sum((0, 2))
    channels.near(
        found[:-1].astype(np.float32 if case.math == "f32" else np.float64),
        case.math,
        np.concatenate([of_dy, of_dy_xmu]),
    )
    channels.near(grads["grad_weight"].numpy(), case.math, of_dy_xmu * t.inv_std)
    channels.near(grads["grad_bias"].numpy(), case.math, of_dy)


@pytest.mark.parametrize("case", channels.MASKED_REDUCTIONS, ids=str)
def test_masked(device, case):
    t = channels.Tensors(device, case)
    flags = channels.some_bits(t)
    found = channels.reduce(
        t, "reduce_bn", grad_output=t.put("dy", case.dtype, case.offset), bitmask=device.put(channels.bits(flags)),
        **t.statistics(),
    )  # fmt: skip
    dy = np.where(flags, t.dy, 0)
    sums = np.concatenate([dy.sum((0, 2)), (dy * (t.x - t.spread(t.mean))).sum((0, 2))])
    channels.near(found[:-1].astype(np.float32 if case.math == "f32" else np.float64), case.math, sums)


def test_gradients_that_lie_otherwise(device):
    """The input begins between two vectors, its gradient at one: neither is read past its ends."""
    case = channels.Case("first", "f16", 4, 3, 21, offset=2)
    t = channels.Tensors(device, case)
    found = channels.reduce(
        t, "reduce_bn", same_alignment=False, grad_output=t.put("dy", case.dtype), **t.statistics()
    )
    channels.near(found[:3].astype(np.float32), "f32", t.dy.sum((0, 2)))
