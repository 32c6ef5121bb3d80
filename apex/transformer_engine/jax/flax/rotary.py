"""Rotary position embeddings: J. Su et al., "RoFormer", arXiv:2104.09864."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def rotary_pos_emb(
    x: jax.Array,
    windows: tuple[int, int],
    transpose_batch_sequence: bool,
    group_method: str = "consecutive",
    start: Any = 0,
) -> jax.Array:
    """x [batch, sequence, ..., head_dim] with pairs of numbers turned by angles that grow with the position.

    Pair i of head_dim / 2 turns by position / (low * (high / low) ** (2 i / head_dim)), windows = (low, high). Pairs
    are neighbours ("consecutive"), or a number of the first half and the same of the second ("alternate").
    transpose_batch_sequence: x is [sequence, batch, ..., head_dim]. start: the first position. Returns x's shape and
    dtype; computes in float32, or in x's dtype if wider. Raises ValueError for another method, or an odd head_dim.
    """
    method = group_method.lower().strip().replace("-", "").replace("_", "")
    if method not in ("consecutive", "alternate"):
        raise ValueError(
            f"rotary_pos_emb_group_method must be 'consecutive' or 'alternate', not {group_method!r}"
        )
    width, axis = x.shape[-1], 0 if transpose_batch_sequence else 1
    if width % 2:
        raise ValueError(f"rotary positions turn pairs of numbers, but head_dim is {width}")
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    low, high = windows
    scales = low * (high / low) ** (jnp.arange(0, width, 2, dtype=dtype) / width)
    positions = start + jnp.arange(x.shape[axis], dtype=dtype)
    angles = positions[:, None] / scales
    angles = angles.reshape(*(size if d == axis else 1 for d, size in enumerate(x.shape[:-1])), width // 2)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    side_by_side = method == "consecutive"
    split = (*x.shape[:-1], width // 2, 2) if side_by_side else (*x.shape[:-1], 2, width // 2)
    pair = -1 if side_by_side else -2
    first, second = jnp.moveaxis(x.astype(dtype).reshape(split), pair, 0)
    turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], pair)
    return turned.reshape(x.shape).astype(x.dtype)
