"""Today's fastest public kernels, where they are installed: each function gives {name: implementation}, {} without."""

from __future__ import annotations

import torch


def quack_norm(norm: str, eps: float) -> dict:
    """Of (x, residual, weight, bias), as norms.py's. Its layer norm has no autograd of its own and float32 weights."""
    try:
        from quack.rmsnorm import layernorm_bwd, layernorm_fwd, rmsnorm
    except ImportError:
        return {}

    class LayerNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            y, rstd, mean = layernorm_fwd(x, weight, bias, eps, return_rstd=True, return_mean=True)
            ctx.save_for_backward(x, weight, rstd, mean)
            return y

        @staticmethod
        def backward(ctx, dy):
            x, weight, rstd, mean = ctx.saved_tensors
            return layernorm_bwd(x, weight, dy, rstd, mean)

    return {
        "Quack": {
            "layer": lambda x, r, w, b: LayerNorm.apply(x, w.float(), b.float()),
            "rms": lambda x, r, w, b: rmsnorm(x, w, eps=eps),
            "add rms": lambda x, r, w, b: rmsnorm(x, w, residual=r, eps=eps, prenorm=True),
        }[norm]
    }


def quack_softmax() -> dict:
    """Of (scores, mask), without a scale."""
    try:
        from quack.softmax import softmax
    except ImportError:
        return {}
    return {"Quack softmax alone": lambda x, mask: softmax(x.view(-1, x.shape[-1])).view_as(x)}


def quack_cross_entropy() -> dict:
    """Of (logits, labels): the mean loss, without smoothing, which it has not."""
    try:
        from quack.cross_entropy import cross_entropy
    except ImportError:
        return {}
    return {"Quack unsmoothed": lambda x, t: cross_entropy(x, t, reduction="mean")}
