"""The public engine's functions by the state of a layer (pytorch.cpp_extensions), beside the raw ones."""

from __future__ import annotations

import pytest
import torch
from te_common import DEVICES, FORMULAS, random
from torch_defaults import float32_on_cpu

from apex._legacy import transformer_engine_extensions as tex
from apex.transformer_engine.pytorch import constants, cpp_extensions

pytestmark = pytest.mark.usefixtures("plain_defaults")
U8, F32, BF16 = torch.uint8, torch.float32, torch.bfloat16
ON = pytest.mark.parametrize("device", DEVICES)
NONE = torch.empty(0, dtype=F32, device="cpu")


@pytest.fixture
def plain_defaults():
    with float32_on_cpu():
        yield


def empty(*shape, device="cpu"):
    return torch.zeros(shape, dtype=U8, device=device)


def meta(count=3, device="cpu"):
    made = tex.FP8TensorMeta()
    made.scale = torch.arange(1, count + 1, dtype=F32, device=device)
    made.scale_inv = 1 / made.scale
    made.amax_history = torch.zeros(4, count, dtype=F32, device=device)
    return made


@ON
def test_functions_by_a_state(device):
    """Each is the raw one with the scale, magnitude and inverse of one tensor."""
    e4m3, which = tex.DType.kFloat8E4M3, tex.FP8FwdTensors.GEMM1_WEIGHT
    x, grad = (random(32, 64, seed=s, dtype=BF16, device=device) for s in (0, 1))
    weight, bias = (random(64, seed=s, dtype=BF16, device=device) for s in (2, 3))

    def both(of, raw, *before, behind=()):
        state = meta(device=device)
        plain = [t.clone() for t in (state.scale[1], state.amax_history[0, 1], state.scale_inv[1])]
        found = getattr(cpp_extensions, of)(*before, state, which, e4m3, *behind)
        wanted = getattr(tex, raw)(*before, *plain, e4m3, *behind)
        pairs = zip(found, wanted, strict=True) if isinstance(wanted, list) else [(found, wanted)]
        assert all(torch.equal(a, b) for a, b in pairs), of
        if "transpose_bgrad_fused" not in of or "cast" in of:
            assert state.amax_history[0, 1] == plain[1] > 0 and not state.amax_history[1:].any()

    both("cast_to_fp8", "cast_to_fp8", x)
    both("fp8_cast_transpose_bgrad_fused", "fused_cast_transpose_bgrad", x)
    both("fp8_cast_transpose_bgrad_dgelu_fused", "fused_cast_transpose_bgrad_dgelu", grad, x)
    codes = tex.cast_to_fp8(x, meta(device=device).scale[0], NONE, NONE, e4m3)
    both("fp8_transpose_bgrad_fused", "fused_fp8_transpose_bgrad", codes, behind=(tex.DType.kBFloat16,))
    for name in FORMULAS:
        both(name, name, x)
    both("layernorm_fwd_fp8", "layernorm_fwd_fp8", x, weight, bias, 1e-5, behind=(0, False))
    both("rmsnorm_fwd_fp8", "rmsnorm_fwd_fp8", x, weight, 1e-5, behind=(0, True))
    arguments = meta(device=device), which, e4m3
    codes, turned = cpp_extensions.fp8_cast_transpose_fused(x, *arguments)
    assert torch.equal(codes, tex.cast_to_fp8(x, meta(device=device).scale[1], NONE, NONE, e4m3))
    assert torch.equal(codes.t(), turned)
    out = empty(32, 64, device=device)
    cpp_extensions.layernorm_fwd_fp8(x, weight, bias, 1e-5, *arguments, 0, False, ln_out=out)
    assert torch.equal(out, cpp_extensions.layernorm_fwd_fp8_inf(x, weight, bias, 1e-5, *arguments, 0, False))
    cpp_extensions.rmsnorm_fwd_fp8(x, weight, 1e-5, *arguments, 0, False, rmsnorm_out=out)
    assert torch.equal(out, cpp_extensions.rmsnorm_fwd_fp8_inf(x, weight, 1e-5, *arguments, 0, False))
    plain = cpp_extensions.geglu(
        x, None, which, constants.TE_DType[BF16]
    )  # as a program calls it without FP8
    assert torch.allclose(plain.double(), FORMULAS["geglu"](x.double()), rtol=1e-2, atol=1e-3)
    back = cpp_extensions.cast_from_fp8(codes, meta(device=device), which, e4m3, tex.DType.kBFloat16)
    assert torch.allclose(back.double(), x.double(), rtol=2.0**-3, atol=2.0**-8)


@ON
def test_products_by_a_state(device):
    e4m3, which = tex.DType.kFloat8E4M3, tex.FP8FwdTensors
    x, weight, bias = (random(*s, seed=len(s), device=device) for s in ((48, 64), (32, 64), (32,)))
    state = meta(device=device)
    w, b = (
        cpp_extensions.cast_to_fp8(t, state, i, e4m3)
        for t, i in ((weight, which.GEMM1_WEIGHT), (x, which.GEMM1_INPUT))
    )
    wide = [cpp_extensions.cast_from_fp8(t, state, i, e4m3, F32) for t, i in ((w, 1), (b, 0))]
    arguments = w, state.scale_inv, which.GEMM1_WEIGHT, e4m3, b, state.scale_inv, which.GEMM1_INPUT, e4m3
    out, before = cpp_extensions.fp8_gemm(
        *arguments, BF16, None, bias=bias.bfloat16(), use_bias=True, gelu=True
    )
    wanted = wide[1].double() @ wide[0].double().t() + bias.bfloat16().double()
    assert torch.allclose(before.double(), wanted, rtol=2e-2, atol=2e-2) and out.dtype == before.dtype == BF16
    assert torch.allclose(out.double(), FORMULAS["gelu"](wanted), rtol=2e-2, atol=2e-2)
    out = empty(48, 32, device=device)
    index = which.GEMM1_OUTPUT
    cpp_extensions.fp8_gemm(
        *arguments, F32, None, out=out, out_index=index, fp8_meta_tensor=state, D_dtype=e4m3
    )
    assert state.amax_history[0, 2] > 0
    wanted = wide[1] @ wide[0].t()
    found = cpp_extensions.cast_from_fp8(out, state, index, e4m3, F32)
    assert torch.allclose(found, wanted, rtol=2.0**-3, atol=2.0**-8)
    # Without FP8: forward, the input's and the weight's gradient of a layer.
    y, no_bias, no_before = cpp_extensions.gemm(weight, x, F32, None, bias=bias, use_bias=True)
    assert torch.allclose(y, x @ weight.t() + bias, atol=1e-4) and no_bias.numel() == no_before.numel() == 0
    grad = random(48, 32, seed=5, device=device)
    of_input = cpp_extensions.gemm(weight, grad, F32, None, layout="NN", grad=True)[0]
    assert torch.allclose(of_input, grad @ weight, atol=1e-4)
    of_weight, of_bias, _ = cpp_extensions.gemm(x, grad, F32, None, layout="NT", grad=True, use_bias=True)
    assert torch.allclose(of_weight, grad.t() @ x, atol=1e-4) and torch.allclose(
        of_bias, grad.sum(0), atol=1e-4
    )
    _, _, before = cpp_extensions.gemm(weight, x, F32, None, gelu=True)
    assert torch.allclose(before, x @ weight.t(), atol=1e-4)
    with pytest.raises(ValueError, match="layout"):
        cpp_extensions.gemm(weight, x, F32, None, layout="TT")
    with pytest.raises(NotImplementedError, match="overlap"):
        cpp_extensions.gemm(weight, x, F32, None, ub=object())
