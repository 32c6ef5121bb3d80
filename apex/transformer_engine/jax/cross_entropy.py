"""Softmax cross entropy with label smoothing, for JAX, in one pass over the logits each way."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from apex.transformer_engine.jax import _library
from apex.transformer_engine.jax._arrays import check_floating, math_dtype

__all__ = ["cross_entropy"]

IGNORED = -100  # gpu::xentropy_ignored_label of csrc/device/xentropy_arguments.h


def cross_entropy(
    logits: jax.Array, labels: jax.Array, *, smoothing: float = 0.0, dtype: Any = None
) -> jax.Array:
    """The loss of every label: (1 - smoothing) * -log p(label) + smoothing * mean over classes of -log p.

    logits: [..., classes]; labels: [...], int32 or int64, in [0, classes): another gives nan, but -100 a loss of 0.
    Returns [...] of `dtype`: float32, or float64 of float64, if None. Raises TypeError for another dtype and
    ValueError for shapes or a smoothing that do not fit.
    """
    check_floating("cross_entropy", logits=logits)
    if labels.dtype not in (jnp.int32, jnp.int64):
        raise TypeError(f"cross_entropy: labels must be int32 or int64, not {labels.dtype}")
    if logits.ndim < 1 or labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"cross_entropy: logits of shape {logits.shape} need labels of the same shape without the last dimension, "
            f"not {labels.shape}"
        )
    if logits.shape[-1] == 0:
        raise ValueError(f"cross_entropy: logits have no classes: their shape is {logits.shape}")
    if not 0 <= smoothing <= 1:
        raise ValueError(f"cross_entropy: smoothing must be between 0 and 1, not {smoothing}")
    return _cross_entropy(float(smoothing), jnp.dtype(dtype or math_dtype(logits)))(logits, labels)


@functools.cache
def _cross_entropy(smoothing: float, dtype: jnp.dtype) -> Any:
    """The differentiable function of (logits, labels)."""

    def run_forward(logits, labels):
        normalizers = jax.ShapeDtypeStruct((*labels.shape, 2), math_dtype(logits))
        results = [jax.ShapeDtypeStruct(labels.shape, dtype), normalizers]
        return tuple(_library.call("xentropy_forward", results, logits, labels, smoothing=smoothing))

    def run_backward(grad, logits, labels, normalizers):
        results = [jax.ShapeDtypeStruct(logits.shape, logits.dtype)]
        arguments = (grad, logits, labels, normalizers)
        return tuple(_library.call("xentropy_backward", results, *arguments, smoothing=smoothing))

    forward_formula = functools.partial(_forward_formula, smoothing, dtype)
    backward_formula = functools.partial(_backward_formula, smoothing)
    forward = _library.op("xentropy", run_forward, forward_formula, (True, True))
    backward = _library.op("xentropy", run_backward, backward_formula, (True,) * 4)

    @jax.custom_vjp
    def function(logits, labels):
        return forward(logits, labels)[0]

    def keep(logits, labels):
        losses, normalizers = forward(logits, labels)
        return losses, (logits, labels, normalizers)

    def pull_back(kept, grad):
        return (*backward(grad, *kept), None)

    function.defvjp(keep, pull_back)
    return function


def _of_labels(labels, classes):
    """Labels that index, which are ignored, and which are wrong."""
    ignored = labels == IGNORED
    wrong = ~ignored & ((labels < 0) | (labels >= classes))
    return jnp.clip(labels, 0, classes - 1), ignored, wrong


def _forward_formula(smoothing, dtype, logits, labels):
    math, classes = logits.astype(math_dtype(logits)), logits.shape[-1]
    largest = math.max(-1)
    shifted = math - largest[..., None]
    total = jnp.exp(shifted).sum(-1)
    index, ignored, wrong = _of_labels(labels, classes)
    of_label = jnp.take_along_axis(shifted, index[..., None], -1)[..., 0]
    losses = jnp.log(total) - (1 - smoothing) * of_label - smoothing * shifted.mean(-1)
    losses = jnp.where(ignored, 0, jnp.where(wrong, jnp.nan, losses))
    return losses.astype(dtype), jnp.stack([largest, total], -1)


def _backward_formula(smoothing, grad, logits, labels, normalizers):
    classes = logits.shape[-1]
    index, ignored, wrong = _of_labels(labels, classes)
    softmax = jnp.exp(logits.astype(normalizers.dtype) - normalizers[..., :1]) / normalizers[..., 1:]
    target = jax.nn.one_hot(index, classes, dtype=softmax.dtype) * (1 - smoothing) + smoothing / classes
    weight = jnp.where(wrong, jnp.nan, jnp.where(ignored, 0, grad.astype(softmax.dtype)))
    return (jnp.where(ignored[..., None], 0, weight[..., None] * (softmax - target)).astype(logits.dtype),)
