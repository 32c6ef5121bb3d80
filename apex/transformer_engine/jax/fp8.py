"""FP8 for JAX: the recipe in force, what layers remember of magnitudes, and products of numbers in FP8.

As in transformer_engine.jax since 1.8: a layer keeps in the collection `FP8_META` ("fp8_metas"), for each product and
for its input (i), its kernel (w) and its output's gradient (g), the history of largest magnitudes and the scale made
of it: amax_i_0 [steps], scale_i_0 [1], and so on. The history after a step comes back as the
gradient of the collection, and the next step makes its scales of it:

    loss, grads = jax.value_and_grad(loss_of)(variables)
    variables = update_collections({FP8_META: grads[FP8_META]}, variables)

`update_fp8_metas`, of versions before 1.8, makes those scales at once, and the step then finds the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from apex.transformer_engine.common.recipe import DelayedScaling, Format
from apex.transformer_engine.jax.sharding import MeshResource, global_shard_guard, max_over_ranks

__all__ = [
    "FP8_META",
    "AmaxComputeAlgo",
    "FP8Helper",
    "fp8_autocast",
    "get_delayed_scaling",
    "is_fp8_available",
    "is_fp8_enabled",
    "update_collections",
    "update_fp8_metas",
]

FP8_META = "fp8_metas"
AMAX, SCALE = "amax", "scale"
TENSORS = ("i", "w", "g")  # of a product: input, kernel, gradient of the output
_enabled = False
_recipe = DelayedScaling()


@contextlib.contextmanager
def fp8_autocast(
    enabled: bool = False,
    fp8_recipe: DelayedScaling | None = None,
    mesh_resource: MeshResource | None = None,
    sharding_resource: MeshResource | None = None,
) -> Iterator[None]:
    """Layers that are called inside multiply in FP8, if enabled; how they are split goes by `mesh_resource`.

    sharding_resource: that argument's name before 1.0. Raises ValueError for a recipe that cannot be followed here:
    with functions of one's own, products left out of FP8, or magnitudes that are not reduced.
    """
    global _enabled, _recipe
    recipe = DelayedScaling() if fp8_recipe is None else fp8_recipe
    _check(recipe)
    before = _enabled, _recipe
    try:
        with global_shard_guard(sharding_resource if mesh_resource is None else mesh_resource):
            _enabled, _recipe = bool(enabled), recipe if enabled else _recipe
            yield
    finally:
        _enabled, _recipe = before


def _check(recipe: Any) -> None:
    if not isinstance(recipe, DelayedScaling):
        raise ValueError(f"fp8_autocast for JAX follows DelayedScaling, not {type(recipe).__name__}")
    if recipe.amax_compute_algo not in ("max", "most_recent"):
        raise ValueError("fp8_autocast for JAX: amax_compute_algo must be 'max' or 'most_recent'")
    if recipe.scaling_factor_compute_algo is not None:
        raise ValueError("fp8_autocast for JAX: scaling_factor_compute_algo must be None")
    if any(recipe.override_linear_precision):
        raise ValueError("fp8_autocast for JAX makes all three products in FP8: no override_linear_precision")
    if not recipe.reduce_amax:
        raise ValueError("fp8_autocast for JAX: reduce_amax must be True")


def is_fp8_enabled() -> bool:
    """Whether layers multiply in FP8 here."""
    return _enabled


def is_fp8_available(gpu_id: int | None = None) -> tuple[bool, str]:
    """(True, ""): where a card does not multiply FP8, its products are made of widened numbers."""
    return True, ""


def get_delayed_scaling() -> DelayedScaling:
    """The recipe in force."""
    return _recipe


def formats() -> tuple[Any, Any]:
    """The dtypes of the forward and of the backward pass: FNUZ where the default device is a gfx94x, else OCP."""
    fnuz = _has_fnuz()
    wide = jnp.float8_e5m2fnuz if fnuz else jnp.float8_e5m2
    narrow = jnp.float8_e4m3fnuz if fnuz else jnp.float8_e4m3fn
    return narrow, wide if _recipe.fp8_format is Format.HYBRID else narrow


@functools.cache
def _has_fnuz() -> bool:
    return str(getattr(jax.local_devices()[0], "compute_capability", "")).startswith("gfx94")


class AmaxComputeAlgo(enum.Enum):
    """Which magnitude of a history counts."""

    MAX = "max"
    MOST_RECENT = "most_recent"


class _InForce(type):
    """Attributes that say what the innermost fp8_autocast says."""

    INITIALIZED = property(lambda _: _enabled)
    MARGIN = property(lambda _: float(_recipe.margin))
    FP8_FORMAT = property(lambda _: _recipe.fp8_format)
    FWD_DTYPE = property(lambda _: formats()[0])
    BWD_DTYPE = property(lambda _: formats()[1])
    AMAX_HISTORY_LEN = property(lambda _: _recipe.amax_history_len)
    AMAX_COMPUTE_ALGO = property(lambda _: AmaxComputeAlgo(_recipe.amax_compute_algo))


class FP8Helper(metaclass=_InForce):
    """What the innermost fp8_autocast says, by the public engine's names, and what layers' states are called.

    INITIALIZED, MARGIN, FP8_FORMAT, FWD_DTYPE, BWD_DTYPE, AMAX_HISTORY_LEN, AMAX_COMPUTE_ALGO; they are read alone.
    initialize and finalize are fp8_autocast without a context, outside of any.
    """

    FP8_COLLECTION_NAME = FP8_META
    FP8_AMAX_NAME = AMAX
    FP8_SCALE_NAME = SCALE

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Whether layers multiply in FP8 here."""
        return _enabled

    @staticmethod
    def initialize(
        margin: float = 0.0,
        fp8_format: Format = Format.HYBRID,
        amax_history_len: int = 1,
        amax_compute_algo: AmaxComputeAlgo = AmaxComputeAlgo.MAX,
    ) -> None:
        """Layers multiply in FP8 from here on."""
        global _enabled, _recipe
        algorithm = AmaxComputeAlgo(amax_compute_algo).value
        _recipe = DelayedScaling(margin, 1, fp8_format, amax_history_len, algorithm)
        _enabled = True

    @staticmethod
    def finalize() -> None:
        """Layers do not any more."""
        global _enabled, _recipe
        _enabled, _recipe = False, DelayedScaling()

    @staticmethod
    def update_collections(new: Mapping[str, Any], original: Mapping[str, Any]) -> dict[str, Any]:
        """As te.update_collections."""
        return update_collections(new, original)


def largest(dtype: Any) -> float:
    """The largest number of a dtype."""
    return float(jnp.finfo(dtype).max)


def names(kind: str, product: int) -> list[str]:
    """What the three arrays of a kind, AMAX or SCALE, of a product are called."""
    return [f"{kind}_{tensor}_{product}" for tensor in TENSORS]


def new_metas(products: int) -> dict[str, jax.Array]:
    """What a layer of so many products remembers at first: histories [steps] of 0 and scales [1] of 1, float32."""
    made: dict[str, jax.Array] = {}
    for product in range(products):
        made |= {name: jnp.zeros(_recipe.amax_history_len, jnp.float32) for name in names(AMAX, product)}
        made |= {name: jnp.ones(1, jnp.float32) for name in names(SCALE, product)}
    return made


def update_collections(new: Mapping[str, Any], original: Mapping[str, Any]) -> dict[str, Any]:
    """`original` with the collections of `new` in it, one level down too: {collection: {...}}."""
    merged = dict(original)
    for name, value in new.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = update_collections(value, merged[name]) if both else value
    return merged


def update_fp8_metas(state: Mapping[str, Any]) -> dict[str, Any]:
    """`state` with the scales of its collection FP8_META made anew of its histories.

    scale = (largest of the format / amax) / 2^margin; the old one where amax is 0, infinite or nan, or so small that
    there is no such number. amax is the largest of the history, or its newest, as the recipe in force says. Without the
    collection, `state` as it is.
    """
    if FP8_META not in state:
        return dict(state)
    return {**state, FP8_META: _update(state[FP8_META])}


def _update(metas: Mapping[str, Any]) -> dict[str, Any]:
    if names(AMAX, 0)[0] not in metas:
        return {name: _update(inner) for name, inner in metas.items()}
    updated, product = dict(metas), 0
    while names(AMAX, product)[0] in metas:
        made = _scales(_settings(), *_stacked(metas, product))
        updated |= dict(zip(names(SCALE, product), made, strict=True))
        product += 1
    return updated


def _stacked(metas: Mapping[str, Any], product: int) -> list[jax.Array]:
    """(histories [3, steps], scales [3, 1]) of a product."""
    return [jnp.stack([metas[name] for name in names(kind, product)]) for kind in (AMAX, SCALE)]


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What of the recipe in force a product goes by: dtypes of both passes, margin, whether the newest amax counts."""

    forward: Any
    backward: Any
    margin: float
    newest: bool


def _settings() -> _Settings:
    forward, backward = formats()
    return _Settings(forward, backward, _recipe.margin, _recipe.amax_compute_algo == "most_recent")


def _scales(settings: _Settings, history: jax.Array, before: jax.Array) -> jax.Array:
    """The scales [3, 1] of a product's histories [3, steps] and of the scales before."""
    forward, backward = largest(settings.forward), largest(settings.backward)
    limits = jnp.asarray([[forward], [forward], [backward]], jnp.float32)
    amax = history[:, :1] if settings.newest else history.max(-1, keepdims=True)
    wanted = limits / amax / 2.0**settings.margin
    scale = jnp.where((amax > 0) & jnp.isfinite(amax) & jnp.isfinite(wanted), wanted, before)
    return jnp.where(scale > 0, scale, 1)  # a layer that the loss does not reach has no gradient, which is 0


def quantize(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """x * scale, in float32, as FP8: rounded to nearest even, saturated; nan is kept, and infinity is nan in FNUZ."""
    scaled = x.astype(jnp.float32) * scale
    limit = largest(dtype)
    saturated = jnp.where(jnp.isnan(scaled), scaled, jnp.clip(scaled, -limit, limit))
    if "fnuz" in jnp.dtype(dtype).name:
        saturated = jnp.where(jnp.isinf(scaled), jnp.nan, saturated)
    # Else XLA, which may keep more precision than is asked for, takes this conversion and the one back for none.
    return jax.lax.optimization_barrier(saturated.astype(dtype))


def _largest_magnitude(x: jax.Array) -> jax.Array:
    magnitude = jnp.where(jnp.isnan(x), 0, jnp.abs(x.astype(jnp.float32)))
    return max_over_ranks(magnitude.max(initial=0.0))


def _contract(a: jax.Array, b: jax.Array, axes: Any, scale: jax.Array, dtype: Any) -> jax.Array:
    """The product of FP8 arrays over `axes`, summed in float32 and scaled. bfloat16 holds every FP8 number exactly; XLA
    makes an FP8 product of this where the device has one."""
    wide = jnp.bfloat16 if jax.default_backend() != "cpu" else jnp.float32
    product = jax.lax.dot_general(
        a.astype(wide), b.astype(wide), (axes, ((), ())), preferred_element_type=jnp.float32
    )
    return (product * scale).astype(dtype)


def dot(x: jax.Array, kernel: jax.Array, metas: Mapping[str, jax.Array], product: int = 0) -> jax.Array:
    """x @ kernel in FP8, and its gradients.

    x: [..., contracted]; kernel: [contracted, features]. metas: as `new_metas` makes them, of which those of `product`
    are used: the scales are made of the histories. Their gradient is what they are after the step: each history moved
    on, its first number what this step saw, and the scales that it used.
    """
    return _dot(_settings(), x, kernel.astype(x.dtype), *_stacked(metas, product))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(settings, x, kernel, amax, scale):
    return _dot_forward(settings, x, kernel, amax, scale)[0]


def _dot_forward(settings, x, kernel, amax, scale):
    scale = _scales(settings, amax, scale)
    inverse = 1 / scale
    qx, qk = quantize(x, scale[0, 0], settings.forward), quantize(kernel, scale[1, 0], settings.forward)
    output = _contract(qx, qk, ((x.ndim - 1,), (0,)), inverse[0, 0] * inverse[1, 0], x.dtype)
    moved = jnp.roll(amax, -1, 1)
    moved = moved.at[:, 0].set(jnp.stack([_largest_magnitude(x), _largest_magnitude(kernel), jnp.float32(0)]))
    # An array of no elements carries the dtypes: residuals must be arrays.
    kept = (qx, qk, jnp.zeros(0, x.dtype), jnp.zeros(0, kernel.dtype), moved, scale, inverse)
    return output, kept


def _dot_backward(settings, kept, grad):
    qx, qk, of_x, of_kernel, moved, scale, scale_inv = kept
    qg = quantize(grad, scale[2, 0], settings.backward)
    grad_x = _contract(qg, qk, ((grad.ndim - 1,), (1,)), scale_inv[2, 0] * scale_inv[1, 0], of_x.dtype)
    over = tuple(range(grad.ndim - 1))
    grad_kernel = _contract(qx, qg, (over, over), scale_inv[0, 0] * scale_inv[2, 0], of_kernel.dtype)
    moved = moved.at[2, 0].set(_largest_magnitude(grad))
    return grad_x, grad_kernel, moved, scale


_dot.defvjp(_dot_forward, _dot_backward)
