"""Contiguous buffers: one for all buckets of the same dtypes."""

from __future__ import annotations

import torch

from apex.contrib.optimizers._flat import flat


def gradient_buffers(buckets, device):
    """(buffers, the part of each bucket): zeros, in grad_sync_dtype, for buckets that follow each other."""
    buffers, firsts = {}, {}
    for key, (first, last) in _spans(buckets).items():
        firsts[key] = first
        buffers[key] = torch.zeros(last - first, dtype=key[1], device=device)
    parts = [
        buffers[b.dtypes()].narrow(0, b.contiguous_buffer_offset - firsts[b.dtypes()], b.bucket_size)
        for b in buckets
    ]
    return list(buffers.values()), parts


def parameter_buffers(buckets, device):
    """{dtypes of buckets: zeros, in param_sync_dtype, for all buckets of these dtypes}."""
    return {key: torch.zeros(last, dtype=key[2], device=device) for key, (_, last) in _spans(buckets).items()}


def part_of(buffers, bucket):
    """A bucket's part of the parameter buffers; None where there is none."""
    buffer = buffers.get(bucket.dtypes())
    first = bucket.contiguous_buffer_offset
    if buffer is None or buffer.numel() < first + bucket.bucket_size:
        return None
    return buffer.narrow(0, first, bucket.bucket_size)


def view_of(part, fragment, p):
    """The elements from a parameter's first fragment on, shaped like it; `part` is that of its bucket."""
    if part.dtype != p.dtype and not part.dtype.is_floating_point:
        part = part.view(p.dtype)
    return part.as_strided(p.shape, p.stride(), part.storage_offset() + fragment.bucket_range[0])


def check_can_move(p, bucket):
    """Raises RuntimeError unless a parameter can be a view of a buffer of its bucket's param_sync_dtype."""
    dtype = bucket.param_sync_dtype
    same_bytes = not dtype.is_floating_point and dtype.itemsize == p.dtype.itemsize
    if p.dtype != dtype and not same_bytes:
        raise RuntimeError(
            f"apex.contrib.optimizers: a parameter of {p.dtype} cannot be a view of a buffer of {dtype}: pass "
            f"param_sync_dtype={p.dtype}, or leave out contiguous_param_buffer"
        )


def move(p, fragment, part):
    """A parameter becomes a view of `part`, the buffer of its first fragment's bucket."""
    view = view_of(part, fragment, p)
    flat(view).copy_(flat(p))
    p.data = view


def _spans(buckets):
    """{dtypes: (where the first of these buckets begins, where the last one ends)}."""
    spans = {}
    for bucket in buckets:
        begin = bucket.contiguous_buffer_offset
        first, _ = spans.get(bucket.dtypes(), (begin, 0))
        spans[bucket.dtypes()] = first, begin + bucket.bucket_size
    return spans
