"""A layer of a transformer for Flax: self attention, in a decoder attention to the encoder, and the MLP."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from apex.transformer_engine.jax.flax.attention import MultiHeadAttention, RelativePositionBiases
from apex.transformer_engine.jax.flax.module import LayerNorm, LayerNormMLP
from apex.transformer_engine.jax.sharding import global_mesh_resource

Initializer = Callable[..., jax.Array]
LogicalRules = Sequence[tuple[str, str | tuple[str, ...] | None]]


class TransformerLayerType(enum.Enum):
    """Whether a layer attends to itself alone, or to an encoder's output, too."""

    ENCODER = "encoder"
    DECODER = "decoder"


def extend_logical_axis_rules(rules: LogicalRules) -> LogicalRules:
    """`rules` with those of the layers' own axes behind them, over the mesh axes of the resource in force.

    Raises ValueError where a rule of the same axis says something else.
    """
    mesh = global_mesh_resource()
    data = tuple(axis for axis in (mesh.dp_resource, mesh.fsdp_resource) if axis is not None)
    own: list[tuple[str, Any]] = [
        ("batch", data or None),
        ("embed", mesh.fsdp_resource),
        ("mlp", mesh.tp_resource),
        ("heads", mesh.tp_resource),
        ("joined_kv", mesh.tp_resource),
        ("qkv_dim", None),
        ("act", None),
        ("relpos_buckets", None),
        ("length", None),
    ]
    given: dict[str, list[Any]] = {}
    for name, axis in rules:
        given.setdefault(name, []).append(axis)
    extended = list(rules)
    for name, axis in own:
        if name not in given:
            extended.append((name, axis))
        elif axis is not None and _axes(axis) not in map(_axes, given[name]):
            raise ValueError(
                f"the rules give the axis {name!r} to {given[name]}, but the mesh resource to {axis!r}"
            )
    return tuple(extended)


def _axes(axis: str | Sequence[str] | None) -> tuple[str, ...]:
    """A rule's mesh axes: one alone is the same as a tuple of it."""
    return () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)


class TransformerLayer(nn.Module):
    """A layer of an encoder or a decoder.

    Each part is: norm, part, dropout, residual; output_layernorm moves the norm before self attention behind the whole
    layer, and apply_residual_connection_post_layernorm takes the residual behind the norm. inputs: [batch, sequence,
    width], or [sequence, batch, width] with transpose_batch_sequence; returns the same. hidden_size: of all heads
    together, which may be another width. attention_mask and encoder_decoder_mask: true where a key is left out, [batch,
    1, queries, keys]. self_attn_bias_type: self attention's attn_bias_type; rotary positions are both attentions'.
    Submodules: attention, or of a decoder self_attention and encoder_decoder_attention; mlp, relpos_bias,
    output_layernorm.
    """

    hidden_size: int = 512
    mlp_hidden_size: int = 2048
    num_attention_heads: int = 8
    num_gqa_groups: int | None = None
    layernorm_type: str = "layernorm"
    layernorm_epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    hidden_dropout: float = 0.1
    hidden_dropout_dims: Sequence[int] = ()
    attention_dropout: float = 0.1
    intermediate_dropout: float = 0.1
    intermediate_dropout_dims: Sequence[int] = ()
    dropout_rng_name: str = "dropout"
    mha_kernel_init: Initializer = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
    mlp_kernel_init: Initializer = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
    mlp_activations: Sequence[str | Callable[[jax.Array], jax.Array]] = ("relu",)
    use_bias: bool = False
    bias_init: Initializer = nn.initializers.zeros
    apply_residual_connection_post_layernorm: bool = False
    output_layernorm: bool = False
    float32_attention_logits: bool = False
    layer_type: TransformerLayerType = TransformerLayerType.ENCODER
    self_attn_mask_type: str = "causal"
    self_attn_bias_type: str | None = None
    enable_relative_embedding: bool = True
    relative_embedding: nn.Module | None = None
    enable_rotary_pos_emb: bool = False
    rotary_pos_emb_windows: tuple[int, int] = (1, 10000)
    rotary_pos_emb_group_method: str = "consecutive"
    dtype: Any = jnp.float32
    drop_path: float = 0.0
    fuse_qkv_params: bool = True
    transpose_batch_sequence: bool = False
    scale_attn_logits: bool = False
    scaled_query_init: bool = True

    def _attention(self, name: str, **fields: Any) -> MultiHeadAttention:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is no multiple of {self.num_attention_heads} heads"
            )
        return MultiHeadAttention(
            num_attention_heads=self.num_attention_heads,
            num_gqa_groups=self.num_gqa_groups,
            head_dim=self.hidden_size // self.num_attention_heads,
            attention_dropout=self.attention_dropout,
            dropout_rng_name=self.dropout_rng_name,
            layernorm_type=self.layernorm_type,
            layernorm_epsilon=self.layernorm_epsilon,
            zero_centered_gamma=self.zero_centered_gamma,
            kernel_init=self.mha_kernel_init,
            use_bias=self.use_bias,
            bias_init=self.bias_init,
            return_layernorm_output=self.apply_residual_connection_post_layernorm,
            enable_rotary_pos_emb=self.enable_rotary_pos_emb,
            rotary_pos_emb_windows=self.rotary_pos_emb_windows,
            rotary_pos_emb_group_method=self.rotary_pos_emb_group_method,
            dtype=self.dtype,
            fuse_qkv_params=self.fuse_qkv_params,
            transpose_batch_sequence=self.transpose_batch_sequence,
            scale_attn_logits=self.scale_attn_logits,
            scaled_query_init=self.scaled_query_init,
            float32_logits=self.float32_attention_logits,
            name=name,
            **fields,
        )

    def _drop(self, x: jax.Array, dims: Sequence[int], deterministic: bool) -> jax.Array:
        dropout = nn.Dropout(
            self.hidden_dropout, broadcast_dims=tuple(dims), rng_collection=self.dropout_rng_name
        )
        return dropout(x, deterministic=deterministic)

    def _drop_path(self, x: jax.Array, deterministic: bool) -> jax.Array:
        """Drops a whole sample's part, so that only the residual is left of it."""
        if self.drop_path == 0.0:
            return x
        batch = 1 if self.transpose_batch_sequence else 0
        dims = tuple(d for d in range(x.ndim) if d != batch)
        dropout = nn.Dropout(self.drop_path, broadcast_dims=dims, rng_collection=self.dropout_rng_name)
        return dropout(x, deterministic=deterministic)

    def _bias(self, queries: int, keys: int) -> jax.Array | None:
        """What the distances of self attention add, if anything."""
        if not self.enable_relative_embedding:
            return None
        made = self.relative_embedding or RelativePositionBiases(
            num_buckets=32,
            max_distance=128,
            num_attention_heads=self.num_attention_heads,
            dtype=self.dtype,
            name="relpos_bias",
        )
        return made(queries, keys, self.layer_type is TransformerLayerType.ENCODER)

    @nn.compact
    def __call__(
        self,
        inputs: jax.Array,
        encoded: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
        encoder_decoder_mask: jax.Array | None = None,
        deterministic: bool = False,
        decode: bool = False,
        max_decode_length: int | None = None,
    ) -> jax.Array:
        if self.layer_type is TransformerLayerType.DECODER and encoded is None:
            raise ValueError("a decoder's layer needs `encoded`, what the encoder gave")
        inputs = jnp.asarray(inputs, self.dtype)
        length = inputs.shape[0 if self.transpose_batch_sequence else 1]
        if decode and max_decode_length is not None:
            length = max_decode_length
        finish = functools.partial(self._residual, deterministic=deterministic)
        bias = self._bias(length, length)
        name = "self_attention" if self.layer_type is TransformerLayerType.DECODER else "attention"
        attention = self._attention(
            name,
            attn_mask_type=self.self_attn_mask_type,
            attn_bias_type=self.self_attn_bias_type,
            input_layernorm=not self.output_layernorm,
        )
        position = attention.get_variable("cache", "cache_index", 0) if decode else 0
        output, normalized = attention(
            inputs, inputs, attention_mask, bias, decode=decode, deterministic=deterministic
        )
        x = finish(output, inputs if normalized is None else normalized)
        if self.layer_type is TransformerLayerType.DECODER:
            attention = self._attention("encoder_decoder_attention", attn_mask_type="padding")
            output, normalized = attention(
                x, encoded, encoder_decoder_mask, deterministic=deterministic, query_position=position
            )
            # No drop_path here, as in the public engine.
            x = self._drop(output, self.hidden_dropout_dims, deterministic) + (
                x if normalized is None else normalized
            )
        output, normalized = self._mlp()(x, deterministic=deterministic)
        x = finish(output, normalized if self.apply_residual_connection_post_layernorm else x)
        if self.output_layernorm:
            x = LayerNorm(
                layernorm_type=self.layernorm_type,
                epsilon=self.layernorm_epsilon,
                zero_centered_gamma=self.zero_centered_gamma,
                dtype=self.dtype,
                transpose_batch_sequence=self.transpose_batch_sequence,
                name="output_layernorm",
            )(x)
        return x

    def _residual(self, output: jax.Array, residual: jax.Array, deterministic: bool) -> jax.Array:
        return (
            self._drop_path(self._drop(output, self.hidden_dropout_dims, deterministic), deterministic)
            + residual
        )

    def _mlp(self) -> LayerNormMLP:
        return LayerNormMLP(
            intermediate_dim=self.mlp_hidden_size,
            layernorm_type=self.layernorm_type,
            epsilon=self.layernorm_epsilon,
            zero_centered_gamma=self.zero_centered_gamma,
            kernel_init=self.mlp_kernel_init,
            use_bias=self.use_bias,
            bias_init=self.bias_init,
            return_layernorm_output=self.apply_residual_connection_post_layernorm,
            activations=self.mlp_activations,
            intermediate_dropout_rng_name=self.dropout_rng_name,
            intermediate_dropout_rate=self.intermediate_dropout,
            intermediate_hidden_dropout_dims=self.intermediate_dropout_dims,
            dtype=self.dtype,
            transpose_batch_sequence=self.transpose_batch_sequence,
            name="mlp",
        )
