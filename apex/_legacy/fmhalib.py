"""The functions of public apex's fmhalib. They record no gradients, as there.

qkv is [total, 3, h, d], cu_seqlens [sequences + 1] int32, as apex.contrib.fmha.FMHAFun takes them.
"""

from __future__ import annotations

import torch

from apex._legacy._raw import raw as _raw
from apex.contrib.fmha import _packed

__all__ = ["bwd", "bwd_nl", "fwd"]


@_raw
def fwd(qkv, cu_seqlens, p_dropout, max_s, is_training, is_nl, zero_tensors, gen=None):
    """[attention [total, h, d], what `bwd` needs]

    The second is, where max_s is at most 512, the softmax of every sequence and head, [sequences, h, S, S] for S the
    next multiple of 128; values that dropout dropped are negative. For longer sequences it is for `bwd` alone, and the
    host waits for the device: FMHAFun, which keeps no softmax, does not where flash attention serves it.
    is_training: False: nothing is dropped. is_nl, zero_tensors: taken and left. gen: a torch.Generator, or None for
    torch's own.
    """
    _packed.check(qkv, cu_seqlens, p_dropout, max_s)
    return list(_packed.forward(qkv, cu_seqlens, p_dropout if is_training else 0.0, max_s, gen))


def _check_state(softmax, qkv, cu_seqlens, max_s):
    """Raises ValueError or TypeError unless `fwd` gives such a second result for these."""
    count, heads, dtype, last = cu_seqlens.shape[0] - 1, qkv.shape[2], qkv.dtype, softmax.shape[-1]
    if max_s > _packed.LONGEST_PADDED:
        shape, dtype = (8,), torch.uint8
    else:
        shape = (count, heads, last, last)  # of an equal or a larger max_s
    if softmax.shape != shape or softmax.device != qkv.device or (softmax.dim() == 4 and last < max_s):
        raise ValueError(
            f"fmhalib.bwd: softmax, {list(softmax.shape)} on {softmax.device}, is not what fwd gave for {count} "
            f"sequences of up to {max_s} tokens and {heads} heads on {qkv.device}"
        )
    if softmax.dtype != dtype:
        raise TypeError(f"fmhalib.bwd: softmax is {softmax.dtype}, not {dtype}")


@_raw
def bwd(dout, qkv, softmax, cu_seqlens, p_dropout, max_s, zero_tensors):
    """[gradient of qkv, gradient of the softmax's argument] of the forward that gave `softmax`

    dout: [total, h, d], or [sequences, tokens, h, d] of as many. p_dropout: 0 where the forward's is_training was
    False. The second result is, beyond 512 tokens, `softmax` itself, which is never written to.
    """
    _packed.check(qkv, cu_seqlens, p_dropout, max_s)
    if dout.shape[-2:] != qkv.shape[2:] or dout.numel() != qkv[:, 0].numel() or dout.device != qkv.device:
        raise ValueError(
            f"fmhalib.bwd: dout must be {[qkv.shape[0], *qkv.shape[2:]]} on {qkv.device}, not {list(dout.shape)} on "
            f"{dout.device}"
        )
    if dout.dtype != qkv.dtype:
        raise TypeError(f"fmhalib.bwd: dout is {dout.dtype}, qkv {qkv.dtype}")
    _check_state(softmax, qkv, cu_seqlens, max_s)
    return list(
        _packed.backward(dout.reshape(-1, *qkv.shape[2:]), qkv, cu_seqlens, p_dropout, max_s, softmax)
    )


@_raw
def bwd_nl(dout, qkv, softmax, cu_seqlens, p_dropout, max_s, zero_tensors):
    """[gradient of qkv, gradient of the softmax's argument, those of keys and values [total, 1, 2, h, d]]

    As `bwd`, which public apex splits for few sequences; the third result has its parts there, which add up.
    """
    of_qkv, of_scores = bwd(dout, qkv, softmax, cu_seqlens, p_dropout, max_s, zero_tensors)
    return [of_qkv, of_scores, of_qkv[:, 1:].unsqueeze(1).clone()]
