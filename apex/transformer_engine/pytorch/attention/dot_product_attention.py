"""te.DotProductAttention."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from apex import _symbolic as symbolic
from apex.transformer.utils import divide
from apex.transformer_engine.pytorch import _recompute
from apex.transformer_engine.pytorch.attention import _core, _masks, _packed

_BIASES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
_FORMATS = ("sbhd", "bshd", "thd")


class DotProductAttention(nn.Module):
    """softmax(query key^T / sqrt(kv_channels)) value.

    Args:
        num_attention_heads: of the query, of all ranks.
        kv_channels: size of a head, or (of keys, of values).
        num_gqa_groups: heads of key and value, of all ranks; None: as many as the query's.
        attention_dropout: chance with which an attention weight becomes 0, in training.
        qkv_format: "sbhd", "bshd" or "thd" (sequences one behind the other).
        attn_mask_type: "causal" (from the first key on), "causal_bottom_right" (up to the last), "padding",
            "padding_causal", "padding_causal_bottom_right", "arbitrary", "no_mask".
        window_size: how many keys before and after its own place a query sees; -1: all.
        sequence_parallel, layer_number, attention_type: accepted; nothing depends on them.
        tp_size, tp_group, get_rng_state_tracker: each rank has its part of the heads, and draws its own dropout.
        softmax_scale: None: 1 / sqrt(kv_channels).

    Raises:
        ValueError: a format or mask that there is not; heads that ranks or groups do not divide.
        NotImplementedError: context parallelism.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: dist.ProcessGroup | None = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: dist.ProcessGroup | None = None,
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__()
        if cp_group is not None:
            raise NotImplementedError("cp_group: context parallelism is not supported; leave it None")
        if qkv_format not in _FORMATS:
            raise ValueError(f"qkv_format must be one of {', '.join(_FORMATS)}, not {qkv_format!r}")
        size = tp_size if tp_group is None else dist.get_world_size(tp_group)
        self.num_attention_heads = divide(num_attention_heads, size)
        self.num_gqa_groups = divide(num_gqa_groups or num_attention_heads, size)
        divide(self.num_attention_heads, self.num_gqa_groups)
        self.attention_dropout, self.qkv_format = attention_dropout, qkv_format
        self.attn_mask_type, self.window_size = _masks.kind_of(attn_mask_type), window_size
        _masks.window_of(self.attn_mask_type, window_size)
        channels = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.softmax_scale = 1.0 / math.sqrt(channels) if softmax_scale is None else softmax_scale
        self._tracker = get_rng_state_tracker if size > 1 else None

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        fast_zero_fill: bool = True,
    ) -> torch.Tensor:
        """Attention of this rank's heads.

        Args:
            query_layer, key_layer, value_layer: [s, b, heads, d], [b, s, heads, d] or [t, heads, d], by the format.
            attention_mask: bool, true where a key is left out, that broadcasts to [b, heads, queries, keys]; for
                padding [b, 1, 1, keys], or a pair of such for queries and keys. Not looked at by causal ones.
            cu_seqlens_q, cu_seqlens_kv: int32 [sequences + 1], of "thd": where each sequence begins, and the last
                one ends. max_seqlen_q, max_seqlen_kv: of the longest; None: looked up, for which the host waits.
            checkpoint_core_attention: it is made again in the backward pass.
            core_attention_bias_type: "no_bias", "pre_scale_bias" and "post_scale_bias" of core_attention_bias, which
                broadcasts to [b, heads, queries, keys], or "alibi", of alibi_slopes [heads] or [b, heads].

        Returns:
            [s, b, heads * d], [b, s, heads * d] or [t, heads * d]. A query that sees no key gives zeros.

        Raises:
            ValueError: a mask, a bias or sequences that are missing, or of shapes that do not fit.
        """
        node = symbolic.leaf(
            *(self, query_layer, key_layer, value_layer),
            attention_mask=attention_mask,
            qkv_format=qkv_format,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            checkpoint_core_attention=checkpoint_core_attention,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
        )
        if node is not None:
            return node
        form, kind = qkv_format or self.qkv_format, _masks.kind_of(attn_mask_type or self.attn_mask_type)
        if core_attention_bias_type not in _BIASES:
            raise ValueError(f"core_attention_bias_type must be one of {', '.join(_BIASES)}")
        tensors = query_layer, key_layer, value_layer
        packed = None
        if form == "thd":
            packed = cu_seqlens_q if cu_seqlens_q is not None else cu_seqlens_kv
            tensors, attention_mask = _unpacked(
                tensors, (cu_seqlens_q, cu_seqlens_kv), (max_seqlen_q, max_seqlen_kv), attention_mask, kind
            )
        _masks.check_mask(attention_mask, kind)
        heads = [t.permute(1, 2, 0, 3) if form == "sbhd" else t.transpose(1, 2) for t in tensors]
        self._check(heads)
        window = _masks.window_of(kind, window_size or self.window_size)
        bias = (core_attention_bias_type, core_attention_bias, alibi_slopes)
        if checkpoint_core_attention:
            found = _recompute.checkpoint(self._attend, *heads, kind, window, attention_mask, bias)
        else:
            query, key, value = heads
            found = self._attend(query, key, value, kind, window, attention_mask, bias)
        if packed is not None:
            return _packed.pack(found.transpose(1, 2), packed, query_layer.shape[0]).flatten(-2)
        return (found.permute(2, 0, 1, 3) if form == "sbhd" else found.transpose(1, 2)).flatten(-2)

    def _check(self, heads):
        for name, tensor, wanted in zip(
            ("query", "key", "value"),
            heads,
            (self.num_attention_heads, *[self.num_gqa_groups] * 2),
            strict=True,
        ):
            if tensor.shape[1] != wanted:
                raise ValueError(f"the {name} has {tensor.shape[1]} heads, not {wanted}")
        query, key, value = heads
        if key.shape[:3] != value.shape[:3] or key.shape[3] != query.shape[3]:
            raise ValueError(
                "a value belongs to each key, and a key is as wide as a query: [batch, heads, length, width] are "
                f"{list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
            )

    def _attend(self, query, key, value, kind, window, attention_mask, bias):
        queries, keys, device = query.shape[2], key.shape[2], query.device
        lengths = _masks.lengths_of(attention_mask, kind)
        added = self._bias(bias, queries, keys, lengths, _masks.KINDS[kind][2], device)
        simple = kind.startswith("causal") and window == (-1, 0) and queries == keys and added is None
        mask = None if simple else _masks.left_out(kind, window, attention_mask, queries, keys, device)
        dropout = self.attention_dropout if self.training else 0.0
        fork = self._tracker is not None and dropout > 0.0
        with self._tracker().fork() if fork else contextlib.nullcontext():
            return _core.attend(query, key, value, mask, added, self.softmax_scale, dropout, simple)

    def _bias(self, bias, queries, keys, lengths, bottom_right, device):
        """What is added to scaled scores, or None."""
        kind, given, slopes = bias
        if kind == "alibi":
            if slopes is None:
                slopes = _masks.alibi_slopes(self.num_attention_heads, device)
            return _masks.alibi(slopes, queries, keys, lengths, bottom_right)
        if kind == "no_bias":
            return None
        if given is None:
            raise ValueError(f"core_attention_bias_type={kind!r} needs a core_attention_bias")
        return given * self.softmax_scale if kind == "pre_scale_bias" else given

    def set_context_parallel_group(self, *arguments: Any) -> None:
        """Refuses any group of more than one rank: there is no context parallelism."""
        if arguments and arguments[0] is not None and dist.get_world_size(arguments[0]) > 1:
            raise NotImplementedError("context parallelism is not supported")


def _unpacked(tensors, cu_seqlens, longest, attention_mask, kind):
    """(query, key, value as batches, the mask of their padding)"""
    if cu_seqlens[0] is None and cu_seqlens[1] is None:
        raise ValueError('qkv_format="thd" needs cu_seqlens_q and cu_seqlens_kv')
    if not _masks.KINDS[kind][0] or kind == "arbitrary":
        raise ValueError(f'qkv_format="thd" needs a padding mask, not {kind!r}')
    if attention_mask is not None:
        warnings.warn("attention_mask is not looked at: the padding is that of cu_seqlens", stacklevel=3)
    pair = [given if given is not None else cu_seqlens[1 - i] for i, given in enumerate(cu_seqlens)]
    sizes = [
        most if most is not None else int(_packed.lengths(c).max().item())
        for most, c in zip(longest, pair, strict=True)
    ]
    query, hidden_queries = _packed.unpack(tensors[0], pair[0], sizes[0])
    key, hidden_keys = _packed.unpack(tensors[1], pair[1], sizes[1])
    value, _ = _packed.unpack(tensors[2], pair[1], sizes[1])
    masks = tuple(hidden[:, None, None, :] for hidden in (hidden_queries, hidden_keys))
    return (query, key, value), masks
