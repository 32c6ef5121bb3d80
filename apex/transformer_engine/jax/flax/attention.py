"""Attention for Flax: its core, the layer around it, and T5's relative position biases.

C. Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", arXiv:1910.10683.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from apex.transformer_engine.jax.flax.module import (
    DenseGeneral,
    LayerNormDenseGeneral,
    Softmax,
    SoftmaxType,
    TransformerEngineBase,
)
from apex.transformer_engine.jax.flax.rotary import rotary_pos_emb

Initializer = Callable[..., jax.Array]
_kernel_init = nn.initializers.variance_scaling(1.0, "fan_in", "normal")


_LAYOUTS = ("bshd_bshd_bshd", "bshd_bs2hd", "bs3hd")


class DotProductAttention(nn.Module):
    """softmax(scale query . key + bias) . value, with dropout on the probabilities.

    head_dim, num_attention_heads, num_gqa_groups: sizes of query, and of key and value, of whose fewer heads each
    serves as many queries' heads; None: as many. scale: scale_factor; None: 1 / sqrt(head_dim). attn_bias_type:
    "post_scale_bias", as above, "pre_scale_bias", which scales the bias too, or "no_bias"; None is the first or the
    last, as there is a bias or not. Raises ValueError where the type and the bias, or heads and fields disagree.

    query, key, value: [batch, sequence, heads, head_dim], or [sequence, batch, heads, head_dim] with
    transpose_batch_sequence. qkv_layout "bshd_bs2hd": key is both, [..., 2, heads, head_dim], "bs3hd": query is all
    three, [..., 3, heads, head_dim]; the others are None. mask: true where a key is left out, [batch, 1 or heads,
    queries, keys]; bias: added, likewise. attn_mask_type: "padding" (keys of the mask are left out), "causal" (later
    ones are), "padding_causal" (both) or "no_mask". "causal" and "no_mask" do not look at the mask, as in the public
    engine. Returns the query's shape.
    """

    head_dim: int
    num_attention_heads: int
    num_gqa_groups: int | None = None
    attention_dropout: float = 0.0
    attn_mask_type: str = "causal"
    attn_bias_type: str | None = None
    dtype: Any = jnp.float32
    dropout_rng_name: str = "dropout"
    float32_logits: bool = False
    qkv_layout: str = "bshd_bshd_bshd"
    scale_factor: float | None = None
    transpose_batch_sequence: bool = True

    @nn.compact
    def __call__(
        self,
        query: jax.Array,
        key: jax.Array | None,
        value: jax.Array | None,
        mask: jax.Array | None = None,
        bias: jax.Array | None = None,
        *,
        deterministic: bool = False,
    ) -> jax.Array:
        query, key, value = self._unpacked(query, key, value)
        sizes = "qbhgd,kbhd->bhgqk" if self.transpose_batch_sequence else "bqhgd,bkhd->bhgqk"
        back = "bhgqk,kbhd->qbhgd" if self.transpose_batch_sequence else "bhgqk,bkhd->bqhgd"
        if self.float32_logits:
            query, key = query.astype(jnp.float32), key.astype(jnp.float32)
        grouped = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[3])
        logits = jnp.einsum(sizes, grouped, key)
        batch, heads, groups, queries, keys = logits.shape
        scale = 1 / math.sqrt(self.head_dim) if self.scale_factor is None else self.scale_factor
        if (
            _bias_type(self.attn_bias_type, bias) == "post_scale_bias"
        ):  # the softmax would scale the bias, too
            logits, scale = logits * scale, 1.0
        kind, mask = _softmax_of(self.attn_mask_type, mask)
        probabilities = Softmax(scale_factor=scale, softmax_type=kind)(
            logits.reshape(batch, heads * groups, queries, keys), mask, bias
        ).astype(self.dtype)
        if not deterministic and self.attention_dropout > 0.0:
            # Of this module's own stream, so that seeds give what the public engine's give.
            kept, chance = self.make_rng(self.dropout_rng_name), 1.0 - self.attention_dropout
            kept = jax.random.bernoulli(kept, chance, probabilities.shape).astype(self.dtype)
            probabilities = probabilities * (kept / jnp.asarray(chance, self.dtype))
        grouped = jnp.einsum(back, probabilities.reshape(logits.shape), value.astype(self.dtype))
        return grouped.reshape(query.shape[:2] + (heads * groups, value.shape[-1]))

    def _unpacked(self, query, key, value):
        """Query, key and value, of the heads that the fields say."""
        if self.qkv_layout not in _LAYOUTS:
            raise ValueError(f"qkv_layout must be one of {', '.join(_LAYOUTS)}, not {self.qkv_layout!r}")
        if self.qkv_layout == "bs3hd":
            query, key, value = (query[..., i, :, :] for i in range(3))
        elif self.qkv_layout == "bshd_bs2hd":
            key, value = (key[..., i, :, :] for i in range(2))
        groups = self.num_gqa_groups or self.num_attention_heads
        if self.num_attention_heads % groups:
            raise ValueError(
                f"{self.num_attention_heads} heads of queries cannot share {groups} heads of keys evenly"
            )
        for name, tensor, heads in (
            ("query", query, self.num_attention_heads),
            ("key", key, groups),
            ("value", value, groups),
        ):
            if tensor.ndim != 4 or tensor.shape[2] != heads:
                raise ValueError(
                    f"the {name} must have 4 dimensions and {heads} heads; its shape is {tensor.shape}"
                )
        return query, key, value


def _softmax_of(attn_mask_type: str, mask: jax.Array | None) -> tuple[SoftmaxType, jax.Array | None]:
    """(what is left out, the mask where it counts)"""
    if attn_mask_type in ("padding_causal", "causal_padding"):
        return SoftmaxType.SCALED_UPPER_TRIANG_MASKED, mask
    if attn_mask_type == "causal":
        return SoftmaxType.SCALED_UPPER_TRIANG_MASKED, None
    if attn_mask_type in ("padding", "no_mask"):
        masked = mask is not None and attn_mask_type == "padding"
        return (SoftmaxType.SCALED_MASKED, mask) if masked else (SoftmaxType.SCALED, None)
    raise ValueError(
        f"attn_mask_type must be 'causal', 'padding_causal', 'padding' or 'no_mask', not {attn_mask_type!r}"
    )


def _bias_type(attn_bias_type: str | None, bias: jax.Array | None) -> str:
    if attn_bias_type is None:
        return "no_bias" if bias is None else "post_scale_bias"
    kind = attn_bias_type.lower()
    if kind not in ("no_bias", "pre_scale_bias", "post_scale_bias"):
        raise ValueError(
            "attn_bias_type must be None, 'no_bias', 'pre_scale_bias' or 'post_scale_bias', "
            f"not {attn_bias_type!r}"
        )
    if (kind == "no_bias") is not (bias is None):
        raise ValueError(
            f"attn_bias_type is {attn_bias_type!r}, but there is {'no' if bias is None else 'a'} bias; "
            "a TransformerLayer has one with enable_relative_embedding"
        )
    return kind


# Fields of earlier releases, and what they are called now.
_RENAMED = {
    "num_heads": "num_attention_heads",
    "dropout_rate": "attention_dropout",
    "fuse_qkv": "fuse_qkv_params",
    "apply_residual_connection_post_layernorm": "return_layernorm_output",
}


class MultiHeadAttention(TransformerEngineBase):
    """Attention with its projections: a norm first if input_layernorm, then query, key and value, then the output.

    Returns (output, the norm's output with return_layernorm_output, else None). Submodules: qkv (inputs_q is
    inputs_kv, fuse_qkv_params), or query and kv, or query, key and value; out. With scaled_query_init the query's
    kernel begins divided by sqrt(head_dim), so that logits need no scale. With enable_rotary_pos_emb queries and keys
    are turned by their positions (`rotary_pos_emb`), in decoding by those in the whole sequence; query_position is that
    of the first query where keys are of another sequence. mask: of attn_mask_type, see DotProductAttention.

    num_heads, dropout_rate, fuse_qkv and apply_residual_connection_post_layernorm are names of earlier releases, which
    warn. With the last of them the second result is the residual, as there: the norm's output, or where it is False
    inputs_q. output_layernorm, of earlier releases, is the contrary of input_layernorm.
    """

    head_dim: int
    num_attention_heads: int = 0
    num_gqa_groups: int | None = None
    attention_dropout: float = 0.0
    dropout_rng_name: str = "dropout"
    input_layernorm: bool = True
    layernorm_type: str = "layernorm"
    layernorm_epsilon: float = 1e-6
    return_layernorm_output: bool = False
    zero_centered_gamma: bool = False
    kernel_init: Initializer = _kernel_init
    use_bias: bool = False
    bias_init: Initializer = nn.initializers.zeros
    attn_mask_type: str = "causal"
    attn_bias_type: str | None = None
    enable_rotary_pos_emb: bool = False
    rotary_pos_emb_windows: tuple[int, int] = (1, 10000)
    rotary_pos_emb_group_method: str = "consecutive"
    dtype: Any = jnp.float32
    fuse_qkv_params: bool = True
    transpose_batch_sequence: bool = True
    scale_attn_logits: bool = False
    scaled_query_init: bool = True
    float32_logits: bool = False
    num_heads: int | None = None
    dropout_rate: float | None = None
    output_layernorm: bool | None = None
    apply_residual_connection_post_layernorm: bool | None = None
    fuse_qkv: bool | None = None

    def __post_init__(self) -> None:
        for old, new in _RENAMED.items():
            value = getattr(self, old)
            if value is None:
                continue
            warnings.warn(f"MultiHeadAttention: {old} is called {new} now", DeprecationWarning, stacklevel=3)
            object.__setattr__(self, new, value)
        if self.output_layernorm is not None:
            text = "MultiHeadAttention: output_layernorm is input_layernorm now, and says the contrary"
            warnings.warn(text, DeprecationWarning, stacklevel=3)
            object.__setattr__(self, "input_layernorm", not self.output_layernorm)
        if self.num_attention_heads < 1:
            raise ValueError(f"num_attention_heads must be 1 or more, not {self.num_attention_heads}")
        super().__post_init__()

    def _dense(
        self, name: str, features: Any, init: Initializer, normalized: bool, **fields: Any
    ) -> nn.Module:
        """A projection, with the norm before it if `normalized`."""
        common = {
            "features": features, "kernel_init": init, "use_bias": self.use_bias, "bias_init": self.bias_init,
            "dtype": self.dtype, "transpose_batch_sequence": self.transpose_batch_sequence, "name": name, **fields,
        }  # fmt: skip
        if not normalized:
            return DenseGeneral(**common)
        return LayerNormDenseGeneral(
            enable_layernorm=self.input_layernorm,
            layernorm_type=self.layernorm_type,
            epsilon=self.layernorm_epsilon,
            zero_centered_gamma=self.zero_centered_gamma,
            return_layernorm_output=True,
            **common,
        )

    def _project(self, inputs_q: jax.Array, inputs_kv: jax.Array) -> tuple[jax.Array, ...]:
        """query, key, value as [.., .., heads * head_dim], and what the norm gave."""
        groups = self.num_gqa_groups or self.num_attention_heads
        width, narrow = self.num_attention_heads * self.head_dim, groups * self.head_dim
        depth = math.sqrt(self.head_dim) if self.scaled_query_init else 1.0

        def query_init(key, shape, dtype):
            return self.kernel_init(key, shape, dtype) / depth

        def init_of(parts):
            """Of `parts` kernels side by side, each with fans of its own; the query's is the first of three."""

            def init(key, shape, dtype):
                inits = [query_init, *[self.kernel_init] * 2] if parts == 3 else [self.kernel_init] * 2
                one = (shape[0], shape[1] // parts)
                keys = jax.random.split(key, parts)
                return jnp.concatenate([f(k, one, dtype) for f, k in zip(inits, keys, strict=True)], 1)

            return init

        heads = {"kernel_axes": ("embed", "joined_kv"), "bias_axes": ("joined_kv",)}
        joined = {"kernel_axes": ("embed", "qkv_dim", "joined_kv"), "bias_axes": ("qkv_dim", "joined_kv")}
        same = inputs_q is inputs_kv
        if self.fuse_qkv_params and same and width == narrow:
            qkv, normalized = self._dense("qkv", (3, width), init_of(3), True, **joined)(inputs_q)
            return *(qkv[..., i, :] for i in range(3)), normalized
        query, normalized = self._dense("query", width, query_init, True, **heads)(inputs_q)
        source = normalized if same else inputs_kv
        if self.fuse_qkv_params:
            kv = self._dense("kv", (2, narrow), init_of(2), False, **joined)(source)
            return query, kv[..., 0, :], kv[..., 1, :], normalized
        key, value = (
            self._dense(name, narrow, self.kernel_init, False, **heads)(source) for name in ("key", "value")
        )
        return query, key, value, normalized

    @nn.compact
    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_kv: jax.Array,
        mask: jax.Array | None = None,
        bias: jax.Array | None = None,
        *,
        decode: bool = False,
        deterministic: bool = False,
        query_position: int | jax.Array = 0,
    ) -> tuple[jax.Array, jax.Array | None]:
        query, key, value, normalized = self._project(inputs_q, inputs_kv)
        query, key, value = (t.reshape(*t.shape[:2], -1, self.head_dim) for t in (query, key, value))
        if self.enable_rotary_pos_emb:
            first = self.get_variable("cache", "cache_index", 0) if decode else 0
            query, key = self._turned(query, first if decode else query_position), self._turned(key, first)
        if decode:
            key, value, mask, bias = self._remember(key, value, mask, bias)
        context = DotProductAttention(
            head_dim=self.head_dim,
            num_attention_heads=self.num_attention_heads,
            num_gqa_groups=self.num_gqa_groups,
            attn_mask_type="padding" if decode else self.attn_mask_type,
            attn_bias_type=self.attn_bias_type,
            attention_dropout=self.attention_dropout,
            dropout_rng_name=self.dropout_rng_name,
            dtype=self.dtype,
            float32_logits=self.float32_logits,
            scale_factor=None if self.scale_attn_logits else 1.0,
            transpose_batch_sequence=self.transpose_batch_sequence,
        )(query, key, value, mask, bias, deterministic=deterministic)
        context = context.reshape(*context.shape[:2], -1)
        axes = {"kernel_axes": ("joined_kv", "embed"), "bias_axes": ("embed",)}
        output = self._dense("out", inputs_q.shape[-1], self.kernel_init, False, **axes)(context)
        other = None if self.apply_residual_connection_post_layernorm is None else inputs_q
        return output, normalized if self.return_layernorm_output else other

    def _turned(self, x: jax.Array, start: Any) -> jax.Array:
        settings = (self.transpose_batch_sequence, self.rotary_pos_emb_group_method)
        return rotary_pos_emb(x, self.rotary_pos_emb_windows, *settings, start)

    def _remember(self, key, value, mask, bias):
        """Keys and values so far, in the collection `cache`, which `init` with decode makes as long as its inputs: then
        each call is one position."""
        started = self.has_variable("cache", "cached_key")
        keys = self.variable("cache", "cached_key", jnp.zeros, key.shape, key.dtype)
        values = self.variable("cache", "cached_value", jnp.zeros, value.shape, value.dtype)
        index = self.variable("cache", "cache_index", lambda: jnp.array(0, jnp.int32))
        if not started:
            return key, value, mask, bias
        axis = 0 if self.transpose_batch_sequence else 1
        length = keys.value.shape[axis]
        if key.shape[axis] != 1:
            raise ValueError(f"decoding takes one position a call, not {key.shape[axis]}")
        at = index.value
        keys.value = jax.lax.dynamic_update_slice_in_dim(keys.value, key, at, axis)
        values.value = jax.lax.dynamic_update_slice_in_dim(values.value, value, at, axis)
        index.value = at + 1
        later = (jnp.arange(length) > at)[None, None, None, :]
        later = jnp.broadcast_to(later, (key.shape[1 - axis], 1, 1, length))
        mask = later if mask is None else (mask != 0) | later
        if bias is not None and bias.shape[2] == length:
            bias = jax.lax.dynamic_slice_in_dim(bias, at, 1, 2)
        return keys.value, values.value, mask, bias


class RelativePositionBiases(TransformerEngineBase):
    """A learned number for each head and distance of query and key; far distances share one, in logarithmic buckets.

    Call: (number of queries, of keys, whether keys after the query count too) -> [1, heads, queries, keys]. Parameter:
    rel_embedding [heads, buckets].
    """

    num_buckets: int
    max_distance: int
    num_attention_heads: int
    embedding_init: Initializer = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")
    embedding_axes: tuple[str | None, ...] = ("heads", "relpos_buckets")
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, q_seqlen: int, k_seqlen: int, bidirectional: bool = True) -> jax.Array:
        distance = np.arange(k_seqlen)[None, :] - np.arange(q_seqlen)[:, None]
        buckets = self._buckets(distance, bidirectional)
        shape = (self.num_attention_heads, self.num_buckets)
        table = self.weight("rel_embedding", self.embedding_init, shape, self.embedding_axes)
        return jnp.asarray(table, self.dtype)[:, buckets][None]

    def _buckets(self, distance: np.ndarray, bidirectional: bool) -> np.ndarray:
        """The bucket of every key - query. Half of the buckets hold one distance each, the others ever more."""
        buckets, first = self.num_buckets, np.zeros_like(distance)
        if bidirectional:
            buckets //= 2
            first = np.where(distance > 0, buckets, 0)
            distance = np.abs(distance)
        else:
            distance = np.maximum(-distance, 0)
        exact = buckets // 2
        growth = np.log(np.maximum(distance, 1) / exact) / np.log(self.max_distance / exact)
        far = np.minimum(exact + (growth * (buckets - exact)).astype(np.int64), buckets - 1)
        return first + np.where(distance < exact, distance, far)
