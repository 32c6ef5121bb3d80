"""te.MultiheadAttention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from apex import _symbolic as symbolic
from apex.transformer.utils import divide
from apex.transformer_engine.pytorch import _parameters, _refusals
from apex.transformer_engine.pytorch.attention import _masks
from apex.transformer_engine.pytorch.attention.dot_product_attention import DotProductAttention
from apex.transformer_engine.pytorch.attention.inference import InferenceParams
from apex.transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb
from apex.transformer_engine.pytorch.module import LayerNormLinear, Linear


class MultiheadAttention(torch.nn.Module):
    """Projections to queries, keys and values, DotProductAttention, a projection back.

    Args:
        hidden_size: size of the last dimension, of input and output.
        num_attention_heads, num_gqa_groups, attention_dropout, attn_mask_type, window_size: as of
            DotProductAttention.
        kv_channels: size of a head; None: hidden_size / num_attention_heads.
        layernorm_epsilon, normalization, zero_centered_gamma, input_layernorm, return_layernorm_output: the norm before
            the projections, where there is one.
        init_method, output_layer_init_method: fill the weights before and behind attention; None: normal, 0.023.
        layer_number: from 1 on; names this layer in InferenceParams.
        return_bias: the last bias is not added, but returned beside the output.
        attention_type: "self" or "cross": keys and values are of encoder_output.
        set_parallel_mode: ranks of tp_group share the layer, each with its part of the heads.
        fuse_qkv_params: one weight for all three; else query_weight, key_weight, value_weight.
        qkv_weight_interleaved: of that one weight, each group's queries, key and value lie together.
        qkv_format: "sbhd" ([s, b, hidden]) or "bshd".
        The others: as of Linear.

    Attributes:
        qkv or layernorm_qkv ("self"); query_layer or layernorm_query, and key_value ("cross"); core_attention; proj.

    Raises:
        ValueError: sizes that heads, groups or ranks do not divide; another attention_type; layer_number below 1.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: _parameters.Init | None = None,
        output_layer_init_method: _parameters.Init | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        qkv_format: str = "sbhd",
        **overlaps: Any,
    ) -> None:
        _refusals.check_overlaps("MultiheadAttention", overlaps)
        super().__init__()
        if attention_type not in ("self", "cross"):
            raise ValueError(f"attention_type must be 'self' or 'cross', not {attention_type!r}")
        if qkv_format not in ("sbhd", "bshd"):
            raise ValueError(f"qkv_format must be 'sbhd' or 'bshd', not {qkv_format!r}")
        if layer_number is not None and layer_number < 1:
            raise ValueError(f"layer_number must be 1 or more, not {layer_number}")
        size = (tp_size if tp_group is None else dist.get_world_size(tp_group)) if set_parallel_mode else 1
        groups = num_gqa_groups or num_attention_heads
        self.head = kv_channels or divide(hidden_size, num_attention_heads)
        self.heads, self.groups = divide(num_attention_heads, size), divide(groups, size)
        self.layer_number, self.attention_type = layer_number or 1, attention_type
        self.attn_mask_type, self.window_size = _masks.kind_of(attn_mask_type), window_size
        self.input_layernorm, self.return_bias = input_layernorm, return_bias
        self.return_layernorm_output = return_layernorm_output
        self.qkv_format = qkv_format
        self.interleaved = qkv_weight_interleaved and fuse_qkv_params
        common: dict[str, Any] = dict(
            tp_group=tp_group if set_parallel_mode else None,
            tp_size=size,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            get_rng_state_tracker=get_rng_state_tracker,
            sequence_parallel=sequence_parallel,
            params_dtype=params_dtype,
            device=device,
        )
        norm: dict[str, Any] = dict(
            eps=layernorm_epsilon,
            normalization=normalization,
            zero_centered_gamma=zero_centered_gamma,
            return_layernorm_output=return_layernorm_output,
        )
        column = "column" if set_parallel_mode else None
        before = {**common, "init_method": init_method, "bias": bias, "parallel_mode": column}
        queries, keys = num_attention_heads * self.head, groups * self.head
        self._make_projections(hidden_size, queries, keys, fuse_qkv_params, before, norm)
        self.core_attention = DotProductAttention(
            num_attention_heads,
            self.head,
            num_gqa_groups=groups,
            attention_dropout=attention_dropout,
            qkv_format=qkv_format,
            attn_mask_type=self.attn_mask_type,
            window_size=window_size,
            tp_size=size,
            tp_group=common["tp_group"],
            get_rng_state_tracker=get_rng_state_tracker,
            layer_number=layer_number,
            attention_type=attention_type,
        )
        self.proj = Linear(
            queries,
            hidden_size,
            bias=bias,
            return_bias=return_bias,
            init_method=output_layer_init_method,
            parallel_mode="row" if set_parallel_mode else None,
            **common,
        )

    def _make_projections(self, hidden, queries, keys, fused, common, norm):
        """In self attention one layer makes all three, else one the queries and one keys and values."""
        if self.attention_type == "self":
            sizes = None if fused else {"query_": queries, "key_": keys, "value_": keys}
            outputs, name = queries + 2 * keys, "qkv"
        else:
            sizes, outputs, name = None, queries, "query"
            pair = None if fused else {"key_": keys, "value_": keys}
            self.key_value = Linear(hidden, 2 * keys, parameters_split=pair, **common)
        if self.input_layernorm:
            self._first = f"layernorm_{name}"
            made: Linear = LayerNormLinear(hidden, outputs, parameters_split=sizes, **norm, **common)
        else:
            self._first = "qkv" if name == "qkv" else "query_layer"
            made = Linear(hidden, outputs, parameters_split=sizes, **common)
        self.add_module(self._first, made)

    def set_tensor_parallel_group(self, tp_group: dist.ProcessGroup | None) -> None:
        """Says which ranks share this layer, where it was made with tp_size alone."""
        for module in self.children():
            if isinstance(module, Linear):
                module.set_tensor_parallel_group(tp_group)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        encoder_output: torch.Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: InferenceParams | None = None,
        rotary_pos_emb: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        fast_zero_fill: bool = True,
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        """[s, b, hidden_size] (or [b, s, hidden_size]) of hidden_states; behind it, where asked for, bias and norm.

        encoder_output: of which keys and values are made, in cross attention. inference_params: the cache of a
        generation, to which this call's keys and values are added. rotary_pos_emb: angles [places, 1, 1, r], or a pair
        for queries and keys. The others: as of DotProductAttention and Linear.

        Raises ValueError where encoder_output is missing, or the cache is too small.
        """
        node = symbolic.leaf(
            *(self, hidden_states),
            attention_mask=attention_mask,
            encoder_output=encoder_output,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            is_first_microbatch=is_first_microbatch,
            checkpoint_core_attention=checkpoint_core_attention,
            inference_params=inference_params,
            rotary_pos_emb=rotary_pos_emb,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
        )
        if node is not None:
            return node
        if (encoder_output is None) != (self.attention_type == "self"):
            raise ValueError("encoder_output is what cross attention takes, and self attention does not")
        kind = _masks.kind_of(attn_mask_type or self.attn_mask_type)
        (query, key, value), normed = self._projected(hidden_states, encoder_output, is_first_microbatch)
        offset = 0 if inference_params is None else inference_params.sequence_len_offset
        if rotary_pos_emb is not None:
            pair = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
            query, key = (
                apply_rotary_pos_emb(t, freqs[offset:], self.qkv_format)
                for t, freqs in zip((query, key), pair, strict=True)
            )
        if inference_params is not None:
            key, value = self._cached(inference_params, key, value)
            if kind == "causal":
                kind = "causal_bottom_right"
        found = self.core_attention(
            *(query, key, value),
            attention_mask=attention_mask,
            attn_mask_type=kind,
            window_size=window_size or self.window_size,
            checkpoint_core_attention=checkpoint_core_attention,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
        )
        output = self.proj(found, is_first_microbatch=is_first_microbatch)
        outputs = list(output) if self.return_bias else [output]
        if self.return_layernorm_output and self.input_layernorm:
            outputs.append(normed)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _projected(self, hidden, encoder_output, is_first_microbatch):
        """((query, key, value) [., ., heads, d], the norm's output or None)"""
        found = getattr(self, self._first)(hidden, is_first_microbatch=is_first_microbatch)
        normed = None
        if self.return_layernorm_output and self.input_layernorm:
            found, normed = found
        if self.attention_type == "self":
            return self._split(found, self.heads // self.groups), normed
        pair = self.key_value(encoder_output, is_first_microbatch=is_first_microbatch)
        key, value = self._split(pair, 0)
        return (found.unflatten(-1, (self.heads, self.head)), key, value), normed

    def _split(self, mixed, queries):
        """Of what a projection gives: queries (heads a group; 0: none), keys, values."""
        sizes = (queries, 1, 1) if queries else (1, 1)
        if self.interleaved:
            mixed = mixed.unflatten(-1, (self.groups, sum(sizes), self.head))
            return [part.flatten(-3, -2) for part in mixed.split(sizes, -2)]
        mixed = mixed.unflatten(-1, (-1, self.head))
        return mixed.split([size * self.groups for size in sizes], -2)

    def _cached(self, inference_params, key, value):
        if self.qkv_format == "sbhd":
            return inference_params.extend(self.layer_number, key, value)
        found = inference_params.extend(self.layer_number, key.transpose(0, 1), value.transpose(0, 1))
        return [tensor.transpose(0, 1) for tensor in found]
