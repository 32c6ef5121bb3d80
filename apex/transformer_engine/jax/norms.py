"""Layer norm and RMS norm over the last dimension, for JAX: `layer_norm`, `rms_norm`.

They follow transformer_engine.jax: `gamma` scales and `beta` shifts; with `zero_centered_gamma`, 1 + gamma scales.
Sums are made in float32 (float64 of float64).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from apex.transformer_engine.jax import _library
from apex.transformer_engine.jax._arrays import check_floating, math_dtype

__all__ = ["layer_norm", "rms_norm"]


def layer_norm(
    x: jax.Array,
    gamma: jax.Array,
    beta: jax.Array,
    *,
    epsilon: float = 1e-6,
    zero_centered_gamma: bool = False,
    dtype: Any = None,
) -> jax.Array:
    """(x - mean) / sqrt(variance + epsilon) * gamma + beta.

    x: [..., hidden]; gamma, beta: [hidden], of one dtype. Returns [..., hidden] of `dtype` (x's if None). Raises
    TypeError for integers and ValueError for shapes that do not fit.
    """
    _check("layer_norm", x, gamma=gamma, beta=beta)
    if zero_centered_gamma:
        gamma, beta = _centered(gamma), beta.astype(math_dtype(beta))
    return _norm(True, float(epsilon), jnp.dtype(dtype or x.dtype))(x, gamma, beta.astype(gamma.dtype))


def rms_norm(
    x: jax.Array,
    gamma: jax.Array,
    *,
    epsilon: float = 1e-6,
    zero_centered_gamma: bool = False,
    dtype: Any = None,
) -> jax.Array:
    """x / sqrt(mean(x * x) + epsilon) * gamma; arguments as `layer_norm`'s."""
    _check("rms_norm", x, gamma=gamma)
    gamma = _centered(gamma) if zero_centered_gamma else gamma
    return _norm(False, float(epsilon), jnp.dtype(dtype or x.dtype))(x, gamma)


def _centered(gamma: jax.Array) -> jax.Array:
    return gamma.astype(math_dtype(gamma)) + 1  # in a half, 1 + gamma loses what gamma is about


def _check(op: str, x: jax.Array, **weights: jax.Array) -> None:
    check_floating(op, x=x, **weights)
    if x.ndim < 1 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x needs a last dimension that is not empty, but its shape is {x.shape}")
    for name, weight in weights.items():
        if weight.shape != x.shape[-1:]:
            raise ValueError(f"{op}: {name} has shape {weight.shape}, but x ends in {x.shape[-1:]}")


@functools.cache
def _norm(centered: bool, epsilon: float, dtype: jnp.dtype) -> Any:
    """The differentiable function of (x, gamma [, beta])."""
    unit = "layer_norm" if centered else "rms_norm"

    def run_forward(x, *weights):
        statistic = jax.ShapeDtypeStruct(x.shape[:-1], math_dtype(x))
        results = [jax.ShapeDtypeStruct(x.shape, dtype), *[statistic] * (1 + centered)]
        return tuple(_library.call(f"{unit}_forward", results, x, *weights, eps=epsilon))

    def run_backward(grad, x, *rest):  # rest: [mean,] rstd, gamma
        results = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, *[rest[-1]] * (1 + centered))]
        return tuple(_library.call(f"{unit}_backward", results, grad, x, *rest))

    forward_formula = functools.partial(_forward_formula, centered, epsilon, dtype)
    rows = (True, *(False,) * (1 + centered))
    forward = _library.op(unit, run_forward, forward_formula, rows)
    backward = _library.op(unit, run_backward, functools.partial(_backward_formula, centered))

    @jax.custom_vjp
    def norm(x, *weights):
        return forward(x, *weights)[0]

    def keep(x, *weights):
        output, *statistics = forward(x, *weights)
        return output, (x, statistics, weights[0])

    def pull_back(kept, grad):
        x, statistics, gamma = kept
        return backward(grad, x, *statistics, gamma)

    norm.defvjp(keep, pull_back)
    return norm


def _forward_formula(centered, epsilon, dtype, x, gamma, beta=None):
    math = x.astype(math_dtype(x))
    mean = math.mean(-1)
    shifted = math - mean[..., None] if centered else math
    rstd = jax.lax.rsqrt((shifted * shifted).mean(-1) + epsilon)
    output = shifted * rstd[..., None] * gamma.astype(math.dtype)
    if centered:
        return (output + beta.astype(math.dtype)).astype(dtype), mean, rstd
    return output.astype(dtype), rstd


def _backward_formula(centered, grad, x, *rest):
    *mean, rstd, gamma = rest
    math = math_dtype(x)
    shifted = x.astype(math) - mean[0][..., None] if centered else x.astype(math)
    normalized, dy = shifted * rstd[..., None], grad.astype(math)
    weighted = dy * gamma.astype(math)
    grad_x = weighted - normalized * (weighted * normalized).mean(-1, keepdims=True)
    if centered:
        grad_x = grad_x - weighted.mean(-1, keepdims=True)
    over = tuple(range(x.ndim - 1))
    sums = [(dy * normalized).sum(over), *([dy.sum(over)] if centered else [])]
    return ((grad_x * rstd[..., None]).astype(x.dtype), *(s.astype(gamma.dtype) for s in sums))
