"""softmax(q k^T scale + bias) v, by torch's scaled_dot_product_attention or by products and apex's softmax."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from apex.transformer.functional.fused_softmax import scaled_masked_softmax
from apex.transformer_engine.pytorch._switches import is_unfused, ranged


@ranged("apex.transformer_engine.attention")
def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: float,
    dropout: float,
    causal: bool,
) -> torch.Tensor:
    """[b, heads, queries, d] of query [b, heads, queries, d], key and value [b, groups, keys, d].

    mask: true where a key is left out; a query that looks at none gives zeros. bias: added to scaled scores. causal:
    there is no mask, but queries see no later keys, of which there are as many.
    """
    if is_unfused():
        return _unfused(query, key, value, mask, bias, scale, dropout, causal)
    if bias is not None:
        added = bias.to(query.dtype)
        if mask is not None:
            added = added.masked_fill(mask, -torch.inf)
    else:
        added = None if mask is None else ~mask
    return F.scaled_dot_product_attention(
        *(query, key, value),
        attn_mask=added,
        dropout_p=dropout,
        is_causal=causal and added is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _unfused(query, key, value, mask, bias, scale, dropout, causal):
    repeats = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(repeats, 1) if repeats > 1 else t for t in (key, value))
    scores = query @ key.transpose(-1, -2)
    if bias is not None:
        scores, scale = scores * scale + bias.to(scores.dtype), 1.0
    if causal:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        mask = ones.triu(1)
    weights = F.dropout(scaled_masked_softmax(scores, mask, scale), dropout)
    return weights @ value
