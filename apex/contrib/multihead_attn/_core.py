"""Attention of heads that lie packed in the projections' results: what every function and module here runs.

Query, key and value are views [T, B * heads, d] of a projection's result, and their gradients are written into views of
its gradient: nothing is copied. The products are torch's; the softmax between them, with its mask and dropout, is one
kernel forward and one backward (masked_softmax_dropout). Long rows go to torch's scaled_dot_product_attention, which
does not write the scores to memory.
"""

from __future__ import annotations

import contextlib

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from apex._functional import call, is_traced
from apex._once import differentiable_once
from apex._plain import contiguous
from apex._random import new_seed

_softmax = torch.ops.apex.masked_softmax_dropout_forward.default
_softmax_backward = torch.ops.apex.masked_softmax_dropout_backward.default
# Keys from which on scaled_dot_product_attention is faster: of any attention, and of one without a mask.
LONG, LONG_UNMASKED = 1025, 512
# cuDNN's dropout drops with a probability that is a multiple of 1/16.
_EXACT_DROPOUT = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


def split(projected, heads, parts):
    """[T, B, parts * C] as `parts` views [T, B * heads, d]; in memory each head has its parts side by side."""
    length, batch, width = projected.shape
    return projected.view(length, batch * heads, parts, width // (heads * parts)).unbind(2)


def mask_of_scores(mask, is_time_mask, additive, dtype):
    """A mask [B, Sk], or [Sq, Sk] if is_time_mask, as one that broadcasts to [B, heads, Sq, Sk]; None stays.

    additive: its numbers are added to the scores, and get no gradient. Else what is not 0 is left out.

    Raises:
        ValueError: it has not two dimensions.
        TypeError: it is to be added, and has no floating-point numbers.
    """
    if mask is None:
        return None
    if mask.dim() != 2:
        wanted = "time mask is [Sq, Sk]" if is_time_mask else "padding mask is [batch, Sk]"
        raise ValueError(f"multihead_attn: a {wanted}, not of shape {list(mask.shape)}")
    if additive:
        if not mask.is_floating_point():
            raise TypeError(
                f"multihead_attn: a mask that is added has floating-point numbers, not {mask.dtype}"
            )
        mask = mask.detach().to(dtype)
    elif mask.dtype not in (torch.bool, torch.uint8):
        mask = mask != 0
    return mask[None, None] if is_time_mask else mask[:, None, None]


# ---- the two products and their gradients, written where they belong -------------------------------------------------


def _multiply(left, right, out, scale=1.0):
    """scale * left right, written where `out` lies."""
    if torch.compiler.is_compiling():  # compiled autograd, which traces the backward, takes no view as `out`
        nothing = left.new_zeros((1, 1, 1))
        return out.copy_(torch.baddbmm(nothing, left, right, beta=0, alpha=scale))
    if scale == 1:
        return torch.bmm(left, right, out=out)
    return torch.baddbmm(out, left, right, beta=0, alpha=scale, out=out)


def scores_of(q, k, scale):
    """scale * q k^T: [B * heads, Sq, Sk]."""
    made = q.new_empty((q.shape[1], q.shape[0], k.shape[0]))
    return _multiply(q.transpose(0, 1), k.permute(1, 2, 0), made, scale)


def context_of(probabilities, v):
    """probabilities v: [Sq, B * heads, d]."""
    made = v.new_empty((probabilities.shape[1], probabilities.shape[0], v.shape[2]))
    _multiply(probabilities, v.transpose(0, 1), made.transpose(0, 1))
    return made


def products_backward(grad, probabilities, v, grad_v):
    """Of context_of: writes grad_v, and returns the gradient of the probabilities."""
    grad = grad.transpose(0, 1)
    _multiply(probabilities.transpose(1, 2), grad, grad_v.transpose(0, 1))
    return torch.bmm(grad, v.permute(1, 2, 0))


def scores_backward(grad, q, k, scale, grad_q, grad_k):
    """Of scores_of: writes grad_q and grad_k."""
    _multiply(grad, k.transpose(0, 1), grad_q.transpose(0, 1), scale)
    _multiply(grad.transpose(1, 2), q.transpose(0, 1), grad_k.transpose(0, 1), scale)


def _by_heads(scores, heads):
    return scores.view(scores.shape[0] // heads, heads, *scores.shape[1:])


def _parts(packed, kv, heads):
    """(q, k, v) of a projection of all three, or of two."""
    if kv is None:
        return split(packed, heads, 3)
    return (*split(packed, heads, 1), *split(kv, heads, 2))


class _Attention(torch.autograd.Function):
    """The heads' results [Sq, B, C] side by side. packed: [S, B, 3 C]; or [Sq, B, C], with kv [Sk, B, 2 C]."""

    @staticmethod
    def forward(ctx, packed, kv, heads, scale, mask, dropout, seed):
        q, k, v = _parts(packed, kv, heads)
        scores = _by_heads(scores_of(q, k, scale), heads)
        output, softmax, _ = _softmax(scores, mask, dropout, seed)
        output, softmax = output.flatten(0, 1), softmax if dropout > 0 else None
        ctx.save_for_backward(packed, kv, output, softmax, seed)
        ctx.known = heads, scale, dropout
        return context_of(output, v).view(*packed.shape[:2], heads * v.shape[2])

    @staticmethod
    @differentiable_once("multihead_attn")
    def backward(ctx, saved, grad):
        packed, kv, output, softmax, seed = saved
        heads, scale, dropout = ctx.known
        grads = torch.empty_like(packed), None if kv is None else torch.empty_like(kv)
        q, k, v = _parts(packed, kv, heads)
        grad_q, grad_k, grad_v = _parts(*grads, heads)
        (grad,) = split(grad.contiguous(), heads, 1)
        grad = _by_heads(products_backward(grad, output, v, grad_v), heads)
        before = _by_heads(output, heads) if softmax is None else softmax
        grad = _softmax_backward(grad, before, None, dropout, seed).flatten(0, 1)
        scores_backward(grad, q, k, scale, grad_q, grad_k)
        return (*grads, None, None, None, None, None)


def _composed(packed, kv, heads, scale, mask, dropout, seed):
    """The same in ops that trace and transform."""
    q, k, v = _parts(packed, kv, heads)
    nothing = q.new_zeros((1, 1, 1))
    scores = torch.baddbmm(nothing, q.transpose(0, 1), k.permute(1, 2, 0), beta=0, alpha=scale)
    output = call(
        "masked_softmax_dropout", _softmax, 1, (_by_heads(scores, heads), mask, dropout, seed, False)
    )
    context = torch.bmm(output.flatten(0, 1), v.transpose(0, 1))
    return context.transpose(0, 1).reshape(*packed.shape[:2], heads * v.shape[2])


def _by_torch(packed, kv, heads, scale, mask, dropout):
    """The same by scaled_dot_product_attention; rows whose keys are all left out are zeros here too."""
    length, batch = packed.shape[:2]
    q, k, v = (
        t.view(t.shape[0], batch, heads, t.shape[2]).permute(1, 2, 0, 3) for t in _parts(packed, kv, heads)
    )
    nothing = None
    if mask is not None:
        left_out = mask == -torch.inf if mask.is_floating_point() else mask.bool()
        nothing = left_out.all(-1, keepdim=True)
        mask = mask.masked_fill(nothing, 0.0) if mask.is_floating_point() else ~left_out | nothing
    exact = sdpa_kernel(list(_EXACT_DROPOUT)) if dropout > 0 else contextlib.nullcontext()
    with exact:
        context = functional.scaled_dot_product_attention(q, k, v, mask, dropout, scale=scale)
    if nothing is not None:
        context = context.masked_fill(nothing, 0.0)
    return context.permute(2, 0, 1, 3).reshape(length, batch, heads * v.shape[3])


def attention(packed, kv, heads, mask, dropout, scale=None):
    """softmax(scale * q k^T + mask), with dropout, times v, of each head.

    packed: [S, B, 3 C], a head's query, key and value side by side; or, with kv [Sk, B, 2 C], [Sq, B, C].
    mask: as `mask_of_scores` gives it, or None. dropout: the probability. scale: default d^-1/2.
    A query whose keys are all left out gives zeros, and no gradient. Returns [Sq, B, C]. Raises ValueError where the
    heads do not divide C, and for keys of another batch or width.
    """
    parts = 3 if kv is None else 1
    if heads < 1 or packed.shape[-1] % (heads * parts):
        raise ValueError(
            f"multihead_attn: {packed.shape[-1] // parts} features do not divide into {heads} heads"
        )
    width = packed.shape[-1] // parts
    if kv is not None and (kv.shape[1] != packed.shape[1] or kv.shape[2] != 2 * width):
        raise ValueError(
            f"multihead_attn: queries {list(packed.shape)} need keys and values [time, {packed.shape[1]}, "
            f"{2 * width}], not {list(kv.shape)}"
        )
    scale = (width // heads) ** -0.5 if scale is None else float(scale)
    packed, kv, dropout = contiguous(packed), kv if kv is None else contiguous(kv), float(dropout)
    keys = (packed if kv is None else kv).shape[0]
    if keys >= (LONG_UNMASKED if mask is None else LONG):
        return _by_torch(packed, kv, heads, scale, mask, dropout)
    seed = new_seed(packed.device) if dropout > 0 else None
    arguments = (packed, kv, heads, scale, mask, dropout, seed)
    transforms = is_traced() or torch._C._functorch.maybe_current_level() is not None
    if transforms or torch.overrides.has_torch_function(arguments):
        return _composed(*arguments)
    return _Attention.apply(*arguments)


def dropout_add(x: torch.Tensor, residual: torch.Tensor, prob: float, is_training: bool) -> torch.Tensor:
    """residual + dropout(x)."""
    return residual + functional.dropout(x, p=prob, training=is_training)
