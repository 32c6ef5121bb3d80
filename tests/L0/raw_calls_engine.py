"""Calls of the raw functions of transformer_engine_extensions, for test_raw_modules.py."""

from __future__ import annotations

import torch
from raw_calls import U8, calls, ints, zeros


@calls("transformer_engine_extensions")
def _(m, random):
    def state():
        return torch.full((1,), 3.0, device="cpu", dtype=torch.float32), zeros(1), zeros(1)

    def bytes_of(*shape):
        return zeros(*shape, dtype=U8)

    e4m3, f32, none = m.DType.kFloat8E4M3, m.DType.kFloat32, zeros(0)
    x, w, b, dy = random(32, 16), random(16), random(16), random(32, 16)
    codes = m.cast_to_fp8(x, *state(), e4m3)
    yield "cast_to_fp8", codes
    yield "cast_from_fp8", m.cast_from_fp8(codes, torch.ones_like(w[:1]), e4m3, m.DType.kBFloat16)
    targets = bytes_of(32, 16), bytes_of(16, 32)
    m.cast_to_fp8_noalloc(x, *state()[:1], targets[0], *state()[1:], e4m3)
    m.fused_cast_transpose(x, *state(), *targets, e4m3)
    yield "fused_cast_transpose", targets
    m.fused_cast_transpose_noop(x, zeros(1), *state(), *targets, e4m3)
    yield "fused_cast_transpose_noop", targets
    yield "fused_cast_transpose_bgrad", m.fused_cast_transpose_bgrad(x, *state(), e4m3)
    yield "fused_cast_transpose_bgrad_dgelu", m.fused_cast_transpose_bgrad_dgelu(dy, x, *state(), e4m3)
    yield "fused_fp8_transpose_bgrad", m.fused_fp8_transpose_bgrad(codes, *state()[:2], w[:1], e4m3, f32)
    m.fused_multi_cast_transpose([x], *([s] for s in (state()[0], *targets, *state()[1:])), e4m3)
    yield "fused_multi_cast_transpose", targets
    turned = m.fp8_transpose(codes, e4m3)
    yield "fp8_transpose", turned
    for name in ("gelu", "relu", "qgelu", "srelu", "geglu", "reglu", "swiglu"):
        half = dy[:, :8] if name in ("geglu", "reglu", "swiglu") else dy
        yield name, getattr(m, name)(x, *state(), e4m3)
        yield f"d{name}", getattr(m, f"d{name}")(half, x, f32)
    _, mean, rstd = made = m.layernorm_fwd(x, w, b, 1e-5, 0, True)
    yield "layernorm_fwd", made
    yield "layernorm_fwd_noalloc", m.layernorm_fwd_noalloc(x, w, b, zeros(32, 16), 1e-5, 0, False)
    yield "layernorm_fwd_fp8", m.layernorm_fwd_fp8(x, w, b, 1e-5, *state(), e4m3, 0, False)
    yield "layernorm_bwd", m.layernorm_bwd(dy, x, mean, rstd, w, 0, True)
    _, rstd = made = m.rmsnorm_fwd(x, w, 1e-5, 0, False)
    yield "rmsnorm_fwd", made
    yield "rmsnorm_fwd_noalloc", m.rmsnorm_fwd_noalloc(x, w, zeros(32, 16), 1e-5, 0, False)
    yield "rmsnorm_fwd_fp8", m.rmsnorm_fwd_fp8(x, w, 1e-5, *state(), e4m3, 0, False)
    yield "rmsnorm_bwd", m.rmsnorm_bwd(dy, x, rstd, w, 0, False)
    d, before = zeros(32, 16), zeros(32, 16)
    m.te_gemm(
        w.diag(), none, f32, True, x, none, f32, False, d, none, f32, none, b, f32, before, False, none, 0
    )
    yield "te_gemm", [d, before]
    m.te_gemm(
        *(codes[:16], w[:1], e4m3, True, codes, w[1:2], e4m3, False, d, none, f32, none, b, f32, none, False),
        *(none, 0, True, True, 0),
    )
    yield "te_gemm", [d]
    history, scale, inverse = random(3, 4).abs(), random(4).abs(), zeros(4)
    arguments = [history], [scale], [inverse], "max", e4m3, 0.0
    m.fused_amax_and_scale_update_after_reduction(none, *arguments)
    yield "fused_amax_and_scale_update_after_reduction", [history, scale, inverse]
    scores = random(2, 3, 4, 4)
    soft = m.scaled_aligned_causal_masked_softmax_forward(scores, 0.5)
    yield "scaled_aligned_causal_masked_softmax_forward", soft
    back = m.scaled_aligned_causal_masked_softmax_backward(scores, soft, 0.5)
    yield "scaled_aligned_causal_masked_softmax_backward", back
    yield "fused_rope_forward", m.fused_rope_forward(random(4, 2, 3, 8), random(4, 1, 1, 8), False)
    yield (
        "fused_rope_thd_forward",
        m.fused_rope_thd_forward(random(4, 3, 8), ints(0, 2, 4), random(4, 1, 1, 8)),
    )
