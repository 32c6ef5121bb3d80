"""Attention of packed sequences by products of torch.

To 512 tokens sequences are padded to one length, and what is kept for the backward is public apex's: the softmax of
every sequence and head, negative (-0.0 too) where dropout dropped a value. Longer ones go one by one, some rows of the
softmax at a time; what is kept is the seed of the random numbers, from which the backward makes them again.
"""

from __future__ import annotations

import torch

from apex._once import runs_in_given_dtypes
from apex._plain import is_shape_alone

LONGEST_PADDED, LONGEST = 512, 1 << 16
_ROWS = 256  # of the softmax at a time
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check(qkv, cu_seqlens, p_dropout, max_s):
    """Raises TypeError and ValueError for what does not fit; values of cu_seqlens are looked at on a CPU alone."""
    if qkv.dtype not in _FLOATS:
        raise TypeError(f"fmha takes float16, bfloat16, float32 and float64, not {qkv.dtype}")
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"fmha: cu_seqlens must be int32, not {cu_seqlens.dtype}")
    if qkv.dim() != 4 or qkv.shape[1] != 3 or not 1 <= qkv.shape[3] <= 256:
        raise ValueError(
            f"fmha: qkv must be [total, 3, heads, d] with d from 1 to 256, not {list(qkv.shape)}"
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.device != qkv.device:
        raise ValueError(
            f"fmha: cu_seqlens must be [sequences + 1] on {qkv.device}, with a sequence at least, not "
            f"{list(cu_seqlens.shape)} on {cu_seqlens.device}"
        )
    if not 0 <= p_dropout < 1:
        raise ValueError(f"fmha: p_dropout must be in [0, 1), not {p_dropout}")
    if not 1 <= max_s <= LONGEST:
        raise ValueError(f"fmha: max_s must be from 1 to {LONGEST}, not {max_s}")
    if (
        qkv.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not is_shape_alone(qkv)
        and misfits(cu_seqlens, qkv.shape[0], max_s)
    ):
        raise ValueError(
            f"fmha: cu_seqlens must begin with 0, never fall, end at most at {qkv.shape[0]}, the tokens of qkv, and "
            f"have no sequence longer than max_s, {max_s}; it is {cu_seqlens.tolist()}"
        )


def misfits(cu_seqlens, total, max_s):
    """A tensor: whether sequences are none, too long, or outside qkv."""
    lengths = cu_seqlens.diff()
    return (cu_seqlens[0] != 0) | (cu_seqlens[-1] > total) | (lengths < 0).any() | (lengths > max_s).any()


@runs_in_given_dtypes
def forward(qkv, cu_seqlens, p, max_s, generator=None):
    """(attention [total, h, d], what `backward` needs: [sequences, h, S, S] to 512 tokens, S a multiple of 128)"""
    if max_s <= LONGEST_PADDED:
        return _forward_padded(qkv, cu_seqlens, p, max_s, -(-max_s // 128) * 128, generator)
    seed = torch.randint(2**62, (1,), dtype=torch.int64, device=qkv.device, generator=generator)
    context = torch.zeros_like(qkv[:, 0], memory_format=torch.contiguous_format)
    _one_by_one(qkv, cu_seqlens, max_s, seed, p, lambda rows: _write_context(rows, context))
    return context, seed.view(torch.uint8)


@runs_in_given_dtypes
def backward(dout, qkv, cu_seqlens, p, max_s, state):
    """(gradient of qkv, gradient of the softmax's argument where `state` is the softmax, else state)"""
    if state.dim() == 4:
        return _backward_padded(dout, qkv, cu_seqlens, p, max_s, state)
    wide = torch.promote_types(qkv.dtype, torch.float32)
    gradient = torch.zeros_like(qkv, memory_format=torch.contiguous_format, dtype=wide)
    _one_by_one(
        qkv, cu_seqlens, max_s, state.view(torch.int64), p, lambda rows: _write_gradient(rows, dout, gradient)
    )
    return gradient.to(qkv.dtype), state


# ---- padded ----------------------------------------------------------------------------------------------------------


def _math(tensor):
    """What products are taken in: a CPU has none of halves that are fast."""
    return tensor.dtype if tensor.device.type != "cpu" else torch.promote_types(tensor.dtype, torch.float32)


class _Places:
    """Where tokens are when sequences are padded to `size`, on the device alone."""

    def __init__(self, cu_seqlens, total, size, max_s):
        cu = cu_seqlens.to(torch.int64)
        self.bad = misfits(cu, total, max_s)
        self.count, self.size, self.total = cu.shape[0] - 1, size, total
        position = torch.arange(size, dtype=torch.int64, device=cu.device)
        self.valid = position < cu.diff().unsqueeze(1)  # [sequences, size]
        self.token = (cu[:-1].unsqueeze(1) + position).clamp(0, max(total - 1, 0)) * self.valid
        tokens = torch.arange(total, dtype=torch.int64, device=cu.device)
        of = (torch.searchsorted(cu, tokens, right=True) - 1).clamp(0, self.count - 1)
        self.covered = tokens < cu[-1]
        self.place = of * size + (tokens - cu[of]).clamp(0, size - 1)

    def padded(self, packed):
        """[sequences, h, size, d] of [total, h, d]; what is padding is 0."""
        found = (
            packed[self.token.reshape(-1)]
            if self.total
            else packed.new_zeros(self.token.numel(), *packed.shape[1:])
        )
        found = found.view(self.count, self.size, *packed.shape[1:]) * self.valid[:, :, None, None]
        return found.transpose(1, 2)

    def packed(self, padded):
        """[total, h, d] of [sequences, h, size, d]; rows of no sequence are 0."""
        rows = padded.transpose(1, 2).reshape(self.count * self.size, *padded.shape[1::2])
        return rows[self.place].masked_fill(~self.covered[:, None, None], 0)


def _forward_padded(qkv, cu_seqlens, p, max_s, size, generator):
    places, math = _Places(cu_seqlens, qkv.shape[0], size, max_s), _math(qkv)
    q, k, v = (places.padded(t).to(math) for t in qkv.unbind(1))
    scores = (q * qkv.shape[3] ** -0.5) @ k.transpose(-2, -1)
    scores = scores.masked_fill(~places.valid[:, None, None, :], -torch.inf)
    softmax = torch.softmax(scores, -1, dtype=torch.promote_types(math, torch.float32))
    softmax = softmax.masked_fill(~places.valid[:, None, :, None], 0).to(qkv.dtype)
    if p > 0:
        drawn = torch.rand(softmax.shape, dtype=torch.float32, device=qkv.device, generator=generator)
        softmax = torch.where(drawn < p, -softmax, softmax)
    context = places.packed(_kept(softmax, p).to(math) @ v).to(qkv.dtype)
    return context.masked_fill(places.bad, torch.nan), softmax


def _kept(softmax, p):
    """The softmax with dropout; dropped values have the sign bit."""
    return (softmax / (1 - p)).masked_fill(softmax.signbit(), 0) if p > 0 else softmax


def _backward_padded(dout, qkv, cu_seqlens, p, max_s, softmax):
    places, math = _Places(cu_seqlens, qkv.shape[0], softmax.shape[-1], max_s), _math(qkv)
    q, k, v, g = (places.padded(t).to(math) for t in (*qkv.unbind(1), dout))
    wide = torch.promote_types(math, torch.float32)
    of_v = _kept(softmax, p).to(math).transpose(-2, -1) @ g
    of_kept = (g @ v.transpose(-2, -1)).to(wide)
    if p > 0:
        of_kept = (of_kept / (1 - p)).masked_fill(softmax.signbit(), 0)
    values = softmax.abs().to(wide)
    of_scores = values * (of_kept - (values * of_kept).sum(-1, keepdim=True))
    scaled = (of_scores * qkv.shape[3] ** -0.5).to(math)
    gradients = scaled @ k, scaled.transpose(-2, -1) @ q, of_v
    made = torch.stack([places.packed(t) for t in gradients], 1).to(qkv.dtype)
    return made.masked_fill(places.bad, torch.nan), of_scores.to(softmax.dtype)


# ---- one by one ------------------------------------------------------------------------------------------------------


class _Rows:
    """Some rows of a sequence's softmax: `softmax` and `kept` [h, rows, tokens], where they begin and end in qkv."""

    def __init__(self, q, k, v, begin, end, of_sequence, keep, p):
        self.q, self.k, self.v, self.begin, self.end, self.of_sequence = q, k, v, begin, end, of_sequence
        self.scale, self.keep, self.p = q.shape[-1] ** -0.5, keep, p
        self.softmax = torch.softmax((q * self.scale) @ k.transpose(-2, -1), -1)
        self.kept = self.softmax if keep is None else self.softmax * keep / (1 - p)


def _one_by_one(qkv, cu_seqlens, max_s, seed, p, use):
    """Calls `use` with all rows of every sequence's softmax in turn. The host waits for cu_seqlens and the seed."""
    if is_shape_alone(qkv):  # there are no sequences to go through
        return
    begins = cu_seqlens.tolist()
    if bool(misfits(cu_seqlens, qkv.shape[0], max_s)):
        raise ValueError(f"fmha: cu_seqlens {begins} does not fit {qkv.shape[0]} tokens and max_s {max_s}")
    generator = torch.Generator(qkv.device).manual_seed(seed.item()) if p > 0 else None
    wide = torch.promote_types(qkv.dtype, torch.float32)
    for begin, end in zip(begins, begins[1:], strict=False):
        q, k, v = (t.transpose(0, 1).to(wide) for t in qkv[begin:end].unbind(1))
        for row in range(0, end - begin, _ROWS):
            part = q[:, row : row + _ROWS]
            keep = None
            if p > 0:
                shape = (*part.shape[:2], end - begin)
                keep = torch.rand(shape, dtype=torch.float32, device=qkv.device, generator=generator) >= p
            use(_Rows(part, k, v, begin + row, begin + row + part.shape[1], (begin, end), keep, p))


def _write_context(rows, context):
    context[rows.begin : rows.end] = (rows.kept @ rows.v).transpose(0, 1)


def _write_gradient(rows, dout, gradient):
    g = dout[rows.begin : rows.end].transpose(0, 1).to(rows.q.dtype)
    of_kept = g @ rows.v.transpose(-2, -1)
    if rows.keep is not None:
        of_kept = of_kept * rows.keep / (1 - rows.p)
    of_scores = rows.softmax * (of_kept - (rows.softmax * of_kept).sum(-1, keepdim=True)) * rows.scale
    begin, end = rows.of_sequence
    gradient[rows.begin : rows.end, 0] = (of_scores @ rows.k).transpose(0, 1).to(gradient.dtype)
    gradient[begin:end, 1] += (of_scores.transpose(-2, -1) @ rows.q).transpose(0, 1).to(gradient.dtype)
    gradient[begin:end, 2] += (rows.kept.transpose(-2, -1) @ g).transpose(0, 1).to(gradient.dtype)
