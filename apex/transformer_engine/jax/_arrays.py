"""What every op for JAX asks of its arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp

FLOATING = tuple(map(jnp.dtype, (jnp.float32, jnp.float16, jnp.bfloat16, jnp.float64)))


def check_floating(op: str, **arrays: jax.Array) -> None:
    """Raises TypeError for an array that is not of a dtype that kernels compute with."""
    for name, array in arrays.items():
        if jnp.dtype(array.dtype) not in FLOATING:
            raise TypeError(f"{op}: {name} must be float32, float16, bfloat16 or float64, not {array.dtype}")


def math_dtype(array: jax.Array) -> jnp.dtype:
    """In which sums are made: float64 of float64, else float32."""
    return jnp.dtype(jnp.float64 if array.dtype == jnp.float64 else jnp.float32)
