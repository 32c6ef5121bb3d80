"""The norms of transformer_engine_extensions."""

from __future__ import annotations

import torch

from apex import _fp8
from apex.transformer_engine.pytorch._tex import casts
from apex.transformer_engine.pytorch._tex.checks import raw as _raw
from apex.transformer_engine.pytorch.constants import fp8_dtype

_ops = torch.ops.apex


def _whole(weight, zero_centered_gamma):
    """The weight that a norm multiplies with; of one that is gamma - 1 the sum is made in float32."""
    return weight.to(torch.float32) + 1.0 if zero_centered_gamma else weight


@_raw
def layernorm_fwd(input, weight, bias, eps, sm_margin, zero_centered_gamma):
    """[layer norm of rows of input [rows, columns], mean, 1 / deviation], float32 ones of a row each."""
    shape, weight = (input.shape[-1],), _whole(weight, zero_centered_gamma)
    bias = bias.to(weight.dtype)
    return list(_ops.layer_norm_forward(input, shape, weight, bias, eps, False, input.dtype))


@_raw
def layernorm_fwd_noalloc(input, weight, bias, ln_out, eps, sm_margin, zero_centered_gamma):
    """The same, into ln_out."""
    made, mean, rstd = layernorm_fwd(input, weight, bias, eps, sm_margin, zero_centered_gamma)
    return [ln_out.copy_(made), mean, rstd]


@_raw
def layernorm_fwd_fp8(
    input, weight, bias, eps, scale, amax, scale_inv, otype, sm_margin, zero_centered_gamma
):
    """The same, and the norm is cast in its pass."""
    dtype = fp8_dtype(otype, input.device)
    arguments = input, weight, bias, eps, scale, dtype, casts.given(amax), zero_centered_gamma
    codes, mean, rstd = _fp8.layer_norm(*arguments)
    casts.write_inverse(scale, scale_inv)
    return [casts.as_bytes(codes), mean, rstd]


@_raw
def layernorm_fwd_fp8_noalloc(
    input, weight, bias, eps, scale, ln_out, amax, scale_inv, otype, sm_margin, zero_centered_gamma
):
    """The same, into ln_out."""
    options = otype, sm_margin, zero_centered_gamma
    codes, mean, rstd = layernorm_fwd_fp8(input, weight, bias, eps, scale, amax, scale_inv, *options)
    casts.write_codes("layernorm_fwd_fp8_noalloc", ln_out, codes)
    return [ln_out, mean, rstd]


@_raw
def layernorm_bwd(dz, x, mu, rsigma, gamma, sm_margin, zero_centered_gamma):
    """[gradient of x, of gamma, of beta] from that of layer norm's output."""
    weight = _whole(gamma, zero_centered_gamma)
    made = _ops.layer_norm_backward(dz, x, mu, rsigma, (x.shape[-1],), weight, weight, 0.0)
    return [made[0], *(gradient.to(gamma.dtype) for gradient in made[1:])]


@_raw
def rmsnorm_fwd(input, weight, eps, sm_margin, zero_centered_gamma):
    """[RMS norm of rows of input [rows, columns], 1 / root mean square], the latter float32 [rows]."""
    weight = _whole(weight, zero_centered_gamma)
    return list(_ops.rms_norm_forward(input, (input.shape[-1],), weight, eps, False, input.dtype))


@_raw
def rmsnorm_fwd_noalloc(input, weight, ln_out, eps, sm_margin, zero_centered_gamma):
    """The same, into ln_out."""
    made, rstd = rmsnorm_fwd(input, weight, eps, sm_margin, zero_centered_gamma)
    return [ln_out.copy_(made), rstd]


@_raw
def rmsnorm_fwd_fp8(input, weight, eps, scale, amax, scale_inv, otype, sm_margin, zero_centered_gamma):
    """The same, and the norm is cast in its pass."""
    dtype = fp8_dtype(otype, input.device)
    codes, rstd = _fp8.rms_norm(input, weight, eps, scale, dtype, casts.given(amax), zero_centered_gamma)
    casts.write_inverse(scale, scale_inv)
    return [casts.as_bytes(codes), rstd]


@_raw
def rmsnorm_fwd_fp8_noalloc(
    input, weight, eps, scale, ln_out, amax, scale_inv, otype, sm_margin, zero_centered_gamma
):
    """The same, into ln_out."""
    codes, rstd = rmsnorm_fwd_fp8(
        input, weight, eps, scale, amax, scale_inv, otype, sm_margin, zero_centered_gamma
    )
    casts.write_codes("rmsnorm_fwd_fp8_noalloc", ln_out, codes)
    return [ln_out, rstd]


@_raw
def rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma):
    """[gradient of x, of gamma] from that of RMS norm's output."""
    weight = _whole(gamma, zero_centered_gamma)
    made = _ops.rms_norm_backward(dz, x, rsigma, (x.shape[-1],), weight, 0.0)
    return [made[0], made[1].to(gamma.dtype)]
