"""Dense layers, norms and the softmax for Flax.

Parameters are float32 whatever `dtype` is, in which the layer computes and which it returns. Fields named `..._axes`
are logical axes (flax.linen.partitioning) of the parameter, or () for none. With `transpose_batch_sequence` the first
two dimensions are [sequence, batch] instead of [batch, sequence]; no layer here depends on which is which but
attention.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import partitioning

from apex.transformer_engine.jax import fp8, norms
from apex.transformer_engine.jax.sharding import ShardingType
from apex.transformer_engine.jax.softmax import softmax

Initializer = Callable[..., jax.Array]
_kernel_init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "linear": lambda x: x,
    "gelu": functools.partial(nn.gelu, approximate=True),
    "relu": nn.relu,
    "silu": nn.silu,
    "swish": nn.silu,
    "quick_gelu": lambda x: x * nn.sigmoid(1.702 * x),
    "squared_relu": lambda x: jnp.square(nn.relu(x)),
}


class TransformerEngineBase(nn.Module):
    """What the layers have in common: parameters with logical axes, and products in FP8 where they are asked for."""

    def weight(
        self, name: str, init: Initializer, shape: Sequence[int], axes: Sequence[str | None]
    ) -> jax.Array:
        """A float32 parameter."""
        if not axes:
            return self.param(name, init, tuple(shape), jnp.float32)
        if len(axes) != len(shape):
            raise ValueError(f"{name} has {len(shape)} dimensions, {tuple(shape)}, but axes {tuple(axes)}")
        return partitioning.param_with_axes(name, init, tuple(shape), jnp.float32, axes=tuple(axes))

    def metas(self, products: int) -> dict[str, jax.Array] | None:
        """What this layer remembers of magnitudes (apex.transformer_engine.jax.fp8); None without FP8."""
        if not fp8.is_fp8_enabled():
            return None
        made = fp8.new_metas(products)
        return {
            name: self.variable(fp8.FP8_META, name, lambda value=value: value).value
            for name, value in made.items()
        }


def product(
    x: jax.Array, kernel: jax.Array, metas: dict[str, jax.Array] | None = None, which: int = 0
) -> jax.Array:
    """x @ kernel over x's last and kernel's first dimension, in x's dtype; in FP8 with `metas`, whose product `which`
    it is."""
    if metas is not None:
        return fp8.dot(x, kernel, metas, which)
    return jax.lax.dot_general(x, kernel.astype(x.dtype), (((x.ndim - 1,), (0,)), ((), ())))


def _tuple(value: int | Iterable[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _size(sizes: Iterable[int]) -> int:
    return functools.reduce(operator.mul, sizes, 1)


def contract(
    x: jax.Array, kernel: jax.Array, axes: tuple[int, ...], metas: dict[str, jax.Array] | None
) -> jax.Array:
    """x [..., contracted] with kernel [*contracted, *features] over x's `axes`: [remaining, *features]."""
    axes = tuple(axis % x.ndim for axis in axes)
    kept = [d for d in range(x.ndim) if d not in axes]
    rows = x.transpose(*kept, *axes).reshape(*(x.shape[d] for d in kept), -1)
    features = kernel.shape[len(axes) :]
    flat = product(rows, kernel.reshape(rows.shape[-1], _size(features)), metas)
    return flat.reshape(*flat.shape[:-1], *features)


class DenseGeneral(TransformerEngineBase):
    """x contracted over `axis` with a kernel, plus a bias: [remaining dimensions, *features].

    Parameters: kernel [*contracted, *features], bias [*features].
    """

    features: int | Iterable[int]
    kernel_init: Initializer = _kernel_init
    kernel_axes: tuple[str | None, ...] = ()
    use_bias: bool = True
    bias_init: Initializer = nn.initializers.zeros
    bias_axes: tuple[str | None, ...] = ()
    axis: int | Iterable[int] = -1
    dtype: Any = jnp.float32
    transpose_batch_sequence: bool = False
    sharding_type: ShardingType = ShardingType.SINGLE

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        return projected(self, jnp.asarray(inputs, self.dtype))


def projected(layer: DenseGeneral | LayerNormDenseGeneral, x: jax.Array) -> jax.Array:
    """x through a dense layer's kernel and bias, which are made here, in x's dtype."""
    features, axes = _tuple(layer.features), _tuple(layer.axis)
    shape = (*(x.shape[axis] for axis in axes), *features)
    kernel = layer.weight("kernel", _flat(layer.kernel_init, len(axes)), shape, layer.kernel_axes)
    output = contract(x, kernel, axes, layer.metas(1))
    if not layer.use_bias:
        return output
    return output + layer.weight("bias", layer.bias_init, features, layer.bias_axes).astype(x.dtype)


def _flat(init: Initializer, inputs: int) -> Initializer:
    """`init` of a kernel seen as a matrix [inputs, outputs], so that fans are those of the product."""

    def initialize(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
        return init(key, (_size(shape[:inputs]), _size(shape[inputs:])), dtype).reshape(shape)

    return initialize


class _Normalized(TransformerEngineBase):
    """The fields of layers that begin with a norm, and the norm."""

    def normalized(self, x: jax.Array, kind: str, centered: bool) -> jax.Array:
        """The norm of x; `kind`: "layernorm" or "rmsnorm". Parameters: scale, and ln_bias of layer norms."""
        if kind not in ("layernorm", "rmsnorm"):
            raise ValueError(f"layernorm_type must be 'layernorm' or 'rmsnorm', not {kind!r}")
        init = self.scale_init or (nn.initializers.zeros if centered else nn.initializers.ones)
        gamma = self.weight("scale", init, x.shape[-1:], self.scale_axes)
        settings = {"epsilon": self.epsilon, "zero_centered_gamma": centered}
        if kind == "rmsnorm":
            return norms.rms_norm(x, gamma, **settings)
        beta = self.weight("ln_bias", self.ln_bias_init, x.shape[-1:], self.ln_bias_axes)
        return norms.layer_norm(x, gamma, beta, **settings)


class LayerNorm(_Normalized):
    """Layer norm, or RMS norm, over the last dimension. Parameters: scale [hidden], and ln_bias [hidden] of layer
    norm."""

    epsilon: float = 1e-6
    layernorm_type: str = "layernorm"
    zero_centered_gamma: bool = False
    scale_init: Initializer | None = None
    scale_axes: tuple[str | None, ...] = ("embed",)
    bias_init: Initializer = nn.initializers.zeros
    bias_axes: tuple[str | None, ...] = ("embed",)
    dtype: Any = jnp.float32
    transpose_batch_sequence: bool = False
    sharding_type: ShardingType = ShardingType.SINGLE

    @property
    def ln_bias_init(self) -> Initializer:
        return self.bias_init

    @property
    def ln_bias_axes(self) -> tuple[str | None, ...]:
        return self.bias_axes

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.normalized(jnp.asarray(x, self.dtype), self.layernorm_type, self.zero_centered_gamma)


class LayerNormDenseGeneral(_Normalized):
    """A norm, then a dense layer, whose output is divided by `depth_scaling`.

    Returns (output, the norm's output or None). Parameters: those of LayerNorm and DenseGeneral.
    """

    features: int | Iterable[int]
    enable_layernorm: bool = True
    layernorm_type: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    scale_init: Initializer | None = None
    scale_axes: tuple[str | None, ...] = ("embed",)
    ln_bias_init: Initializer = nn.initializers.zeros
    ln_bias_axes: tuple[str | None, ...] = ("embed",)
    kernel_init: Initializer = _kernel_init
    kernel_axes: tuple[str | None, ...] = ()
    use_bias: bool = False
    bias_init: Initializer = nn.initializers.zeros
    bias_axes: tuple[str | None, ...] = ()
    return_layernorm_output: bool = True
    axis: int | Iterable[int] = -1
    dtype: Any = jnp.float32
    transpose_batch_sequence: bool = True
    depth_scaling: float | None = None
    sharding_type: ShardingType = ShardingType.SINGLE

    @nn.compact
    def __call__(self, inputs: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        x = jnp.asarray(inputs, self.dtype)
        if self.enable_layernorm:
            x = self.normalized(x, self.layernorm_type, self.zero_centered_gamma)
        output = projected(self, x)
        if self.depth_scaling is not None:
            output = output / self.depth_scaling
        return output, x if self.return_layernorm_output else None


class LayerNormMLP(_Normalized):
    """A norm, a dense layer to `intermediate_dim` for each activation, their product, dropout, and a dense layer back.

    Returns (output, the norm's output or None). Parameters: those of LayerNorm; wi_kernel [hidden, activations,
    intermediate_dim], wo_kernel [intermediate_dim, hidden]; with use_bias wi_bias, wo_bias. ("gelu", "linear") is
    GeGLU.
    """

    intermediate_dim: int = 2048
    enable_layernorm: bool = True
    layernorm_type: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    scale_init: Initializer | None = None
    scale_axes: tuple[str | None, ...] = ("embed",)
    ln_bias_init: Initializer = nn.initializers.zeros
    ln_bias_axes: tuple[str | None, ...] = ("embed",)
    kernel_init: Initializer = _kernel_init
    kernel_axes_1: tuple[str | None, ...] = ("embed", "act", "mlp")
    kernel_axes_2: tuple[str | None, ...] = ("mlp", "embed")
    use_bias: bool = False
    bias_init: Initializer = nn.initializers.zeros
    bias_axes_1: tuple[str | None, ...] = ("act", "mlp")
    bias_axes_2: tuple[str | None, ...] = ("embed",)
    return_layernorm_output: bool = True
    activations: Sequence[str | Callable[[jax.Array], jax.Array]] = ("relu",)
    intermediate_dropout_rng_name: str = "dropout"
    intermediate_dropout_rate: float = 0.1
    intermediate_hidden_dropout_dims: Sequence[int] = ()
    axis: int | Iterable[int] = -1
    dtype: Any = jnp.float32
    transpose_batch_sequence: bool = True
    major_sharding_type: Any = None

    @nn.compact
    def __call__(self, inputs: jax.Array, deterministic: bool = False) -> tuple[jax.Array, jax.Array | None]:
        x = jnp.asarray(inputs, self.dtype)
        if _tuple(self.axis) not in ((-1,), (x.ndim - 1,)):
            raise ValueError(f"LayerNormMLP contracts the last dimension; axis is {self.axis!r}")
        if self.enable_layernorm:
            x = self.normalized(x, self.layernorm_type, self.zero_centered_gamma)
        hidden, count, metas = x.shape[-1], len(self.activations), self.metas(2)
        wide = (hidden, count, self.intermediate_dim)
        kernel = self.weight("wi_kernel", _flat(self.kernel_init, 1), wide, self.kernel_axes_1)
        branches = product(x, kernel.reshape(hidden, -1), metas, 0).reshape(*x.shape[:-1], *wide[1:])
        if self.use_bias:
            branches = branches + self.weight("wi_bias", self.bias_init, wide[1:], self.bias_axes_1).astype(
                x.dtype
            )
        z = functools.reduce(
            operator.mul, (_activation(name)(branches[..., i, :]) for i, name in enumerate(self.activations))
        )
        z = nn.Dropout(
            self.intermediate_dropout_rate,
            broadcast_dims=tuple(self.intermediate_hidden_dropout_dims),
            rng_collection=self.intermediate_dropout_rng_name,
        )(z, deterministic=deterministic)
        narrow = (self.intermediate_dim, hidden)
        output = product(z, self.weight("wo_kernel", self.kernel_init, narrow, self.kernel_axes_2), metas, 1)
        if self.use_bias:
            output = output + self.weight("wo_bias", self.bias_init, (hidden,), self.bias_axes_2).astype(
                x.dtype
            )
        return output, x if self.return_layernorm_output else None


def _activation(name: str | Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    if callable(name):
        return name
    if name not in ACTIVATIONS:
        raise ValueError(f"there is no activation {name!r}; there are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


class SoftmaxType(enum.Enum):
    """What is left out of a softmax: nothing, what a mask says, or keys after the query."""

    SCALED = "scaled"
    SCALED_MASKED = "scaled_masked"
    SCALED_UPPER_TRIANG_MASKED = "scaled_upper_triang_masked"


class Softmax(nn.Module):
    """softmax(scale_factor * (inputs + bias)) over the last dimension of [batch, heads, queries, keys].

    A mask is true where a key is left out; SCALED takes none, and SCALED_UPPER_TRIANG_MASKED takes one beside its own.
    """

    scale_factor: float = 1.0
    softmax_type: SoftmaxType = SoftmaxType.SCALED

    @nn.compact
    def __call__(
        self, inputs: jax.Array, mask: jax.Array | None = None, bias: jax.Array | None = None
    ) -> jax.Array:
        kind = SoftmaxType(self.softmax_type)
        if bias is not None:
            inputs = inputs + bias.astype(inputs.dtype)
        causal = kind is SoftmaxType.SCALED_UPPER_TRIANG_MASKED
        if mask is not None and mask.dtype not in (jnp.bool_, jnp.uint8):
            mask = mask != 0
        return softmax(
            inputs, None if kind is SoftmaxType.SCALED else mask, scale=self.scale_factor, causal=causal
        )
