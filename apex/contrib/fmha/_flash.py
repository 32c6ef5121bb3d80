"""Attention of packed sequences by torch's flash attention: halves on NVIDIA GPUs from Ampere on."""

from __future__ import annotations

import contextlib

import torch

from apex.contrib.fmha._packed import misfits

_HALVES = (torch.float16, torch.bfloat16)


def serves(qkv):
    """Whether flash attention takes such a tensor."""
    return (
        qkv.is_cuda
        and torch.version.hip is None
        and qkv.dtype in _HALVES
        and qkv.shape[3] % 8 == 0
        and qkv.numel() > 0
        and torch.cuda.get_device_capability(qkv.device)[0] >= 8
    )


def _begins(cu_seqlens, total):
    """What kernels may read by: rising numbers that do not lie behind the end."""
    return cu_seqlens.clamp(0, total).cummax(0).values.to(torch.int32)


@contextlib.contextmanager
def _in_a_fixed_order():
    """Flash attention's backward adds up in a fixed order only where torch's deterministic algorithms are asked for."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    if before[0] or torch.compiler.is_compiling():
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def forward(qkv, cu_seqlens, p, max_s):
    """(attention [total, h, d], logarithms of the softmax's sums, state of the random numbers, a second part of it)"""
    total, begins = qkv.shape[0], _begins(cu_seqlens, qkv.shape[0])
    q, k, v = qkv.unbind(1)
    out, sums, state, more, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, begins, begins, max_s, max_s, p, False, False
    )
    # Rows of no sequence are not written; all of them are nan where the numbers do not fit.
    covered = torch.arange(total, dtype=torch.int64, device=qkv.device) < begins[-1]
    out = out.masked_fill(~covered.view(-1, 1, 1), 0)
    return out.masked_fill_(misfits(cu_seqlens, total, max_s), torch.nan), sums, state, more


def backward(dout, qkv, cu_seqlens, p, max_s, out, sums, state, more):
    """The gradient of qkv. out, sums, state, more: what the forward returned."""
    begins = _begins(cu_seqlens, qkv.shape[0])
    with _in_a_fixed_order():
        found = torch.ops.aten._flash_attention_backward(
            dout.contiguous(), *qkv.unbind(1), out, sums, begins, begins, max_s, max_s, p, False, state, more
        )
    covered = torch.arange(qkv.shape[0], dtype=torch.int64, device=qkv.device) < begins[-1]
    return torch.stack(found, 1).masked_fill_(~covered.view(-1, 1, 1, 1), 0)
