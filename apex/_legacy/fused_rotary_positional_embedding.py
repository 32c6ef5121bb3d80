"""The functions of public apex's fused_rotary_positional_embedding. They record no gradients, as there."""

from __future__ import annotations

import torch

from apex._legacy import _checks
from apex._legacy._raw import raw as _raw
from apex._loader import bindings

bindings.load()
_ops = torch.ops.apex

__all__ = [
    "backward",
    "backward_2d",
    "backward_cached",
    "backward_thd",
    "forward",
    "forward_2d",
    "forward_cached",
    "forward_thd",
]


@_raw
def forward(input, freqs, transpose_output):
    """`input` [s, b, h, d] turned by the angles `freqs` [s, 1, 1, r]; transpose_output: memory [b, s, h, d]."""
    return _ops.rope_forward(input, freqs, transpose_output=transpose_output)


@_raw
def backward(output_grads, freqs, transpose_output):
    """The gradient of `forward`'s input."""
    return _ops.rope_backward(output_grads, freqs, transpose_output=transpose_output)


@_raw
def forward_cached(input, cos, sin, transpose_output):
    """As `forward`, by cosines and sines."""
    _checks.given("fused_rotary_positional_embedding.forward_cached", sin=sin)
    return _ops.rope_forward(input, cos, sin, transpose_output=transpose_output)


@_raw
def backward_cached(output_grads, cos, sin, transpose_output):
    """The gradient of `forward_cached`'s input."""
    _checks.given("fused_rotary_positional_embedding.backward_cached", sin=sin)
    return _ops.rope_backward(output_grads, cos, sin, transpose_output=transpose_output)


@_raw
def forward_thd(input, cu_seqlens, freqs):
    """`input` [t, h, d], sequences one after the other that begin at cu_seqlens, turned by freqs [max_s, 1, 1, r]."""
    _checks.given("fused_rotary_positional_embedding.forward_thd", cu_seqlens=cu_seqlens)
    return _ops.rope_forward(input, freqs, cu_seqlens=cu_seqlens)


@_raw
def backward_thd(output_grads, cu_seqlens, freqs):
    """The gradient of `forward_thd`'s input."""
    _checks.given("fused_rotary_positional_embedding.backward_thd", cu_seqlens=cu_seqlens)
    return _ops.rope_backward(output_grads, freqs, cu_seqlens=cu_seqlens)


@_raw
def forward_2d(input, cos_h, sin_h, cos_w, sin_w):
    """Images [b, height, width, h, d] as [b, height * width, h, d], turned by tables [1, n, 1, d/2]."""
    return _ops.rope_forward(input, cos_h, sin_h, cos_w, sin_w).flatten(1, 2)


@_raw
def backward_2d(output_grads, cos_h, sin_h, cos_w, sin_w):
    """The gradient of `forward_2d`'s input, [b, height * width, h, d]; output_grads [b, height, width, h, d]."""
    return _ops.rope_backward(output_grads, cos_h, sin_h, cos_w, sin_w).flatten(1, 2)
