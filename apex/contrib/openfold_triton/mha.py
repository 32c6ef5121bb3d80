"""Attention with a mask and a bias of pairs, as OpenFold calls it: torch's scaled_dot_product_attention.

softmax(query key^T / sqrt(width) + (mask - 1) inf + bias) value. query, key, value: [*, heads, length, width];
mask (1: the key is seen, 0: it is not) and bias: whatever broadcasts to [*, heads, length of query, length of key].
Dimensions before length and width may be 1 where another's is not. TypeError: dtypes that differ; ValueError: shapes.
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


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    inf: float,
) -> torch.Tensor:
    scores = _check(query, key, value)
    lead = scores[:-2]
    dtype = query.dtype
    added: torch.Tensor | None = None
    if mask is not None:
        _check_added("mask", mask, scores)
        added = (mask.to(dtype) - 1.0) * min(inf, _most(dtype))
    if bias is not None:
        _check_added("bias", bias, scores)
        bias = bias.to(dtype)
        added = bias if added is None else added + bias
    if added is not None:
        added = _of_sequences(added, scores)
    return scaled_dot_product_attention(
        _flat(query, lead), _flat(key, lead), _flat(value, lead), attn_mask=added
    ).unflatten(0, lead[:-1])


def _most(dtype: torch.dtype) -> float:
    """A finite number, so that a row without a key that is seen has a value in float16, too."""
    # Half of what the dtype holds, written out as torch.jit.script knows no torch.finfo.
    return 32752.0 if dtype == torch.float16 else 1.6e38


def _flat(tensor: torch.Tensor, lead: list[int]) -> torch.Tensor:
    """[sequences, heads, length, width], without a copy of what all sequences share."""
    return tensor.expand(lead + list(tensor.shape[-2:])).flatten(0, -4)


def _of_sequences(added: torch.Tensor, scores: list[int]) -> torch.Tensor:
    """What is added to the scores, with the dimensions of sequences in one; none where it is the same for all."""
    while added.dim() > len(scores):
        added = added.squeeze(0)
    while added.dim() < 2:
        added = added.unsqueeze(0)
    if added.dim() < 4:
        return added
    shape, shared = list(added.shape), True
    for size in shape[:-3]:
        shared = shared and size == 1
    if shared:
        return added.flatten(0, -4)
    return added.expand(scores[:-3] + shape[-3:]).flatten(0, -4)


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[int]:
    """The shape of the scores, [*, heads, length of query, length of key].

    Raises ValueError, TypeError for what is no attention.
    """
    dtype = query.dtype
    if not (query.is_floating_point() and key.dtype == dtype and value.dtype == dtype):
        raise TypeError(
            f"attention takes query, key and value of one floating-point dtype: {dtype}, {key.dtype}, "
            f"{value.dtype}"
        )
    q, k, v = list(query.shape), list(key.shape), list(value.shape)
    dims = len(q)
    right = dims >= 4 and len(k) == dims and len(v) == dims
    right = right and q[-1] == k[-1] and k[-2] == v[-2]
    scores: list[int] = []
    for place in range(dims - 2 if right else 0):
        size = 1
        for given in (q[place], k[place], v[place]):
            right = right and (given == size or given == 1 or size == 1)
            size = given if size == 1 else size
        scores.append(size)
    if not right:
        raise ValueError(
            f"attention takes [*, heads, length, width], with one width of query and key, one length of key and "
            f"value, and dimensions before these that are equal or 1, not {q}, {k}, {v}"
        )
    scores.append(q[-2])
    scores.append(k[-2])
    return scores


def _check_added(name: str, added: torch.Tensor, scores: list[int]) -> None:
    """Raises ValueError for a mask or bias that does not broadcast to the scores."""
    shape = list(added.shape)
    more = len(shape) - len(scores)
    for place, size in enumerate(shape):
        wanted = scores[place - more] if place >= more else 1
        if size != 1 and size != wanted:
            raise ValueError(
                f"attention takes a {name} that broadcasts to [*, heads, query's length, key's length], here "
                f"{scores}, not {shape}"
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
