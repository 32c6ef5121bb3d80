"""Attention with a mask and a bias of pairs, as OpenFold calls it: torch's scaled_dot_product_attention.

softmax(query key^T / sqrt(width) + (mask - 1) inf + bias) value. query, key, value: [*, heads, length, width];
mask (1: the key is seen, 0: it is not) and bias: whatever broadcasts to [*, heads, length of query, length of key].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from apex._functional import Function

__all__ = [
    "AttnBiasJIT",
    "AttnNoBiasJIT",
    "AttnTri",
    "CanSchTriMHA",
    "FusedAttenionCoreFunc",
    "disable",
    "enable",
    "is_enabled",
]

_enabled = False


def is_enabled() -> bool:
    """Whether scripts that ask are to call this attention; False until enable()."""
    return _enabled


def enable() -> None:
    """Turns it on, for scripts that ask is_enabled()."""
    global _enabled
    _enabled = True


def disable() -> None:
    """Turns it off again."""
    global _enabled
    _enabled = False


def CanSchTriMHA(
    in_shape: Sequence[int], has_bias: bool = True, inf: float = 1e9, training: bool = True
) -> bool:
    """Whether AttnTri serves a query of this shape: with a bias, and inf 1e9, as in public apex; of any shape."""
    return bool(has_bias) and inf == 1e9 and len(in_shape) >= 4


def _attend(query, key, value, mask, bias, inf):
    _check(query, key, value)
    dtype = query.dtype
    added = None
    if mask is not None:
        # A finite number, so that a row without a key that is seen has a value in float16, too.
        most = min(inf, torch.finfo(dtype).max / 2)
        added = (mask.to(dtype) - 1.0) * most
    if bias is not None:
        added = bias.to(dtype) if added is None else added + bias.to(dtype)
    lead = query.shape[:-3]
    if added is not None:
        added = _of_sequences(added, lead)
    query, key, value = (tensor.flatten(0, -4) for tensor in (query, key, value))
    return scaled_dot_product_attention(query, key, value, attn_mask=added).unflatten(0, lead)


def _of_sequences(added, lead):
    """What is added to the scores, with `lead` dimensions in one, or none where it is the same for all of them."""
    while added.dim() > len(lead) + 3 and added.shape[0] == 1:
        added = added.squeeze(0)
    if all(size == 1 for size in added.shape[:-3]):
        return added.flatten(0, -4) if added.dim() > 3 else added
    return added.expand(*lead, *added.shape[-3:]).flatten(0, -4)


def _check(query, key, value):
    """Raises ValueError, TypeError for what is no attention."""
    if not all(t.is_floating_point() and t.dtype == query.dtype for t in (query, key, value)):
        raise TypeError(
            f"attention takes query, key and value of one floating-point dtype: {query.dtype}, {key.dtype}, "
            f"{value.dtype}"
        )
    if query.dim() < 4 or not query.dim() == key.dim() == value.dim():
        raise ValueError(
            f"attention takes [*, heads, length, width]: {list(query.shape)}, {list(key.shape)}, "
            f"{list(value.shape)}"
        )


class FusedAttenionCoreFunc(Function):
    """apply(q, k, v, mask=None, bias=None, inf=1e9, is_training=True): attention. Public apex spells it so.

    q, k, v: [batch, heads, length, width], or with dimensions before them; float16, bfloat16, float32 or float64; of
    any width. mask has no gradient. is_training changes nothing: what needs a gradient has one.
    """

    @staticmethod
    def forward(ctx, q, k, v, mask=None, bias=None, inf=1000000000.0, is_training=True):
        return _attend(q, k, v, None if mask is None else mask.detach(), bias, inf)


AttnTri = FusedAttenionCoreFunc.apply


def AttnBiasJIT(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    bias: torch.Tensor,
    inf: float,
) -> torch.Tensor:
    """Attention with a mask and a bias."""
    return _attend(query, key, value, mask, bias, inf)


def AttnNoBiasJIT(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, inf: float
) -> torch.Tensor:
    """Attention with a mask."""
    return _attend(query, key, value, mask, None, inf)
