"""Softmax of attention scores, for JAX: `softmax(scale * logits)`, with a mask or a causal one."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from apex.transformer_engine.jax import _library
from apex.transformer_engine.jax._arrays import check_floating, math_dtype

__all__ = ["softmax"]

_UNIT = "scaled_masked_softmax"


def softmax(
    logits: jax.Array, mask: jax.Array | None = None, *, scale: float = 1.0, causal: bool = False
) -> jax.Array:
    """softmax(scale * logits) over keys, 0 where the mask is true; a row without keys is zeros.

    logits: [batch, heads, queries, keys]. mask: bool or uint8 of the same shape, or 1 where it is broadcast, true
    where a key is left out. causal: the last query sees all keys, each one before it one less. Raises TypeError for
    another dtype and ValueError for shapes that do not fit.
    """
    check_floating("softmax", logits=logits)
    if logits.ndim != 4:
        raise ValueError(f"softmax: logits are [batch, heads, queries, keys], not {logits.shape}")
    if mask is None:
        return _softmax(float(scale), bool(causal), False)(logits)
    if mask.dtype not in (jnp.bool_, jnp.uint8):
        raise TypeError(f"softmax: the mask is bool or uint8, true where a key is left out, not {mask.dtype}")
    fits = mask.ndim == 4 and all(m in (1, x) for m, x in zip(mask.shape, logits.shape, strict=True))
    if not fits:
        raise ValueError(f"softmax: the mask's shape {mask.shape} does not broadcast to {logits.shape}")
    mask = jnp.broadcast_to(mask, (*mask.shape[:3], logits.shape[3]))
    return _softmax(float(scale), bool(causal), True)(logits, mask)


@functools.cache
def _softmax(scale: float, causal: bool, masked: bool) -> Any:
    """The differentiable function of (logits [, mask])."""

    def like(array):
        return [jax.ShapeDtypeStruct(array.shape, array.dtype)]

    def run_forward(*arguments):
        return tuple(
            _library.call(f"{_UNIT}_forward", like(arguments[0]), *arguments, scale=scale, causal=causal)
        )

    def run_backward(grad, output):
        return tuple(
            _library.call(f"{_UNIT}_backward", like(output), grad, output, scale=scale, causal=causal)
        )

    forward = _library.op(_UNIT, run_forward, functools.partial(_forward_formula, scale, causal))
    backward = _library.op(_UNIT, run_backward, functools.partial(_backward_formula, scale))

    @jax.custom_vjp
    def function(logits, *mask):
        return forward(logits, *mask)[0]

    def keep(logits, *mask):
        (output,) = forward(logits, *mask)
        return output, output

    def pull_back(output, grad):
        return (*backward(grad, output), *[None] * masked)

    function.defvjp(keep, pull_back)
    return function


def _forward_formula(scale, causal, logits, mask=None):
    kept = jnp.ones(logits.shape, bool) if mask is None else jnp.broadcast_to(mask == 0, logits.shape)
    if causal:
        queries, keys = logits.shape[-2:]
        kept = kept & jnp.tril(jnp.ones((queries, keys), bool), keys - queries)
    scaled = jnp.where(kept, logits.astype(math_dtype(logits)) * scale, -jnp.inf)
    largest = jnp.where(kept, scaled, jnp.finfo(scaled.dtype).min).max(-1, keepdims=True)
    powers = jnp.where(kept, jnp.exp(scaled - jax.lax.stop_gradient(largest)), 0)
    total = powers.sum(-1, keepdims=True)
    empty = ~kept.any(-1, keepdims=True)
    return (jnp.where(empty, 0, powers / jnp.where(empty, 1, total)).astype(logits.dtype),)


def _backward_formula(scale, grad, output):
    dy, y = grad.astype(math_dtype(output)), output.astype(math_dtype(output))
    return ((scale * y * (dy - (y * dy).sum(-1, keepdims=True))).astype(output.dtype),)
