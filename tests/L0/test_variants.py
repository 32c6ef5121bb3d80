"""The fixture `variant` itself: what it names is what runs."""

from __future__ import annotations

import os

import pytest
import torch
import variants

from apex._loader import bindings, library


def _scale(device, elements=5):
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    source = [torch.ones(elements, device=device, dtype=torch.float32)]
    target = [torch.empty(elements, device=device, dtype=torch.float32)]
    torch.ops.apex.multi_tensor_scale(source, target, flag, 2.0)
    return target[0]


def test_what_is_named_serves(variant):
    bindings.load()
    assert variant.serves("multi_tensor_scale") == variant.wanted
    assert _scale(variant.device).eq(2).all()
    assert bool(variant.references) == (variant.name == "reference")
    if variant.simt:
        # The table is written by a kernel, too.
        assert variant.kernels["multi_tensor_scale_f32_f32"] == 1
    else:
        assert not variant.kernels
    if variant.name.startswith("cpu-v"):
        assert library.load().c.apex_cpu_level() == int(variant.name[-1])


@pytest.mark.parametrize("name", variants.PARAMETERS)
def test_everything_is_restored(name):
    if reason := variants.why_not(name):
        pytest.skip(reason)
    before = os.environ.get("APEX_VARIANT")
    with variants.served_by(name) as served:
        _scale(served.device)
    assert os.environ.get("APEX_VARIANT") == before
    launches, calls = variants._kernels.copy(), variants._references.copy()
    _scale("cpu")
    if bindings.load().native:
        assert variants._kernels == launches and variants._references == calls
        assert library.load().c.apex_cpu_level() == library.load().c.apex_set_cpu_level(0)


def test_a_stranger_is_noticed():
    if reason := variants.why_not("cpu-v1"):
        pytest.skip(reason)
    with pytest.raises(AssertionError, match="the reference"), variants.served_by("cpu-v1"):
        flag = torch.zeros(1, dtype=torch.int32, device="cpu")
        torch.ops.apex_reference.multi_tensor_scale(
            [torch.ones(1, dtype=torch.float32, device="cpu")],
            [torch.ones(1, dtype=torch.float32, device="cpu")],
            flag,
            1.0,
        )
