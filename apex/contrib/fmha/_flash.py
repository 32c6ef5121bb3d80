"""Attention of packed sequences by torch's flash attention: halves on NVIDIA GPUs from Ampere on."""

from __future__ import annotations

import contextlib
import threading

import torch

from apex.contrib.fmha._packed import misfits

_HALVES = (torch.float16, torch.bfloat16)
_AVAILABLE = torch.backends.cuda.is_flash_attention_available()  # whether this torch was built with it
_NUMBERS_AT_ONCE = 8  # halves in 16 bytes
_MOST_SEQUENCES = 65535  # the launch grid's second number


def serves(qkv, sequences):
    """Whether flash attention takes such a tensor, with a gradient, too."""
    if not qkv.is_cuda or torch.version.hip is not None or not _AVAILABLE:
        return False
    major, minor = torch.cuda.get_device_capability(qkv.device)
    # Chips of these have too little shared memory for its backward of heads above 192.
    widest = 192 if (major == 8 and minor > 0) or major >= 12 else 256
    fits = qkv.shape[3] % 8 == 0 and qkv.shape[3] <= widest and 0 < sequences <= _MOST_SEQUENCES
    return major >= 8 and qkv.dtype in _HALVES and fits and qkv.numel() > 0


def readable(tensor):
    """The tensor, or a copy of it, whose rows flash attention reads 16 bytes at a time."""
    *strides, last = tensor.stride()
    begin = 0 if torch.compiler.is_compiling() else tensor.storage_offset()  # torch.compile cannot trace it
    if last == 1 and all(number % _NUMBERS_AT_ONCE == 0 for number in (begin, *strides)):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _begins(cu_seqlens, total, max_s):
    """(where sequences begin; whether the numbers do not fit: then no sequence has a token, and nothing is read)"""
    bad = misfits(cu_seqlens, total, max_s)
    return cu_seqlens.masked_fill(bad, 0), bad


_switch = threading.RLock()


@contextlib.contextmanager
def _in_a_fixed_order():
    """Flash attention's backward adds up in a fixed order only where torch's deterministic algorithms are asked for,
    and not as a warning alone. torch has that switch for the whole process and no argument for it: the lock keeps
    backwards of other devices, on threads of their own, from turning it back under this one."""
    if torch.compiler.is_compiling():
        yield
        return
    with _switch:
        before = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        # Without inductor's switch, which torch's own function turns, too.
        torch._C._set_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])


def _covered(begins, total, dims):
    """Bool: which tokens belong to a sequence, broadcast over `dims` dimensions behind."""
    tokens = torch.arange(total, dtype=torch.int64, device=begins.device)
    return (tokens < begins[-1]).view(-1, *(1,) * dims)


def forward(qkv, cu_seqlens, p, max_s):
    """(attention [total, h, d], logarithms of the softmax's sums, state of the random numbers, a second part of it)"""
    total = qkv.shape[0]
    begins, bad = _begins(cu_seqlens, total, max_s)
    q, k, v = readable(qkv).unbind(1)
    out, sums, state, more, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, begins, begins, max_s, max_s, p, False, False
    )
    # Rows of no sequence are not written.
    out = out.masked_fill(~_covered(begins, total, 2), 0)
    return out.masked_fill_(bad, torch.nan), sums, state, more


def backward(dout, qkv, cu_seqlens, p, max_s, out, sums, state, more):
    """The gradient of qkv. out, sums, state, more: what the forward returned."""
    begins, bad = _begins(cu_seqlens, qkv.shape[0], max_s)
    with _in_a_fixed_order():
        found = torch.ops.aten._flash_attention_backward(
            readable(dout),
            *readable(qkv).unbind(1),
            out,
            sums,
            begins,
            begins,
            max_s,
            max_s,
            p,
            False,
            state,
            more,
        )
    gradient = torch.stack(found, 1).masked_fill_(~_covered(begins, qkv.shape[0], 3), 0)
    return gradient.masked_fill_(bad, torch.nan)
