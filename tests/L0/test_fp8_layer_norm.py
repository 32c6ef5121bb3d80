"""Layer norm to FP8 against float64, on everything that can serve it."""

from __future__ import annotations

import fp8_norms
import torch

from apex import _fp8
from apex._loader import bindings

bindings.load()
op = torch.ops.apex.fp8_layer_norm


@fp8_norms.each_dtype
@fp8_norms.each_input
def test_values(variant, dtype, of):
    fp8_norms.check_values(run, variant, dtype, of, centered=True)


@fp8_norms.each_zero_centered
@fp8_norms.each_weight
def test_weights(variant, of, weight, zero_centered):
    fp8_norms.check_weights(run, variant, of, weight, zero_centered, centered=True)


def test_layouts(variant):
    fp8_norms.check_layouts(run, variant, centered=True)


def test_opcheck():
    fp8_norms.check_with_opcheck(op, arguments)


def test_refused():
    fp8_norms.check_refused(op, arguments)


def arguments(x, weight, scale, amax, dtype, zero_centered):
    return x, weight, None if weight is None else weight * 2, 1e-5, scale, amax, dtype, zero_centered


def run(dtype, zero_centered=False):
    return lambda x, w, b, scale, amax: _fp8.layer_norm(x, w, b, 1e-5, scale, dtype, amax, zero_centered)
