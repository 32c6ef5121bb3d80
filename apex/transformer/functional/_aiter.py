"""AMD's aiter as another backend of rotary embeddings: https://github.com/ROCm/aiter.

Its functions write their first argument; the last three say rotate-half pairing, one angle for each element, and
turned elements first.
"""

from __future__ import annotations

import importlib
import os
import warnings

import torch

from apex._torch_build import check_if_rocm_pytorch

_VARIABLE = "USE_ROCM_AITER_ROPE_BACKEND"
_LAYOUT = (0, False, False)
_module = None


def is_asked_for() -> bool:
    """Whether the environment asks for aiter."""
    return os.environ.get(_VARIABLE, "0") == "1"


def load() -> bool:
    """Imports aiter if it is asked for. Where that cannot be, warns why, and that apex's kernels serve."""
    global _module
    if not is_asked_for():
        return False
    if not check_if_rocm_pytorch():
        why = f"torch {torch.__version__} is not a ROCm build"
    else:
        try:
            _module = importlib.import_module("aiter")
        except ImportError as error:
            why = f"it cannot be imported ({error}); `make aiter` in a checkout of apex installs it"
        else:
            return True
    warnings.warn(
        f"{_VARIABLE}=1 asks for aiter, but {why}. apex's own kernels serve rotary embeddings.", stacklevel=2
    )
    return False


def _kernel(kind, back):
    if _module is None:
        raise RuntimeError(
            f"aiter is not in use: set {_VARIABLE}=1 before apex.transformer.functional is imported, on a ROCm torch "
            "with aiter (`make aiter`)"
        )
    return getattr(_module, f"rope_{kind}{'bwd' if back else 'fwd'}_impl")


def _run(kind, back, t, others, transpose_output):
    # aiter wants the elements of a head side by side.
    t = t if t.stride(-1) == 1 else t.contiguous()
    shape = list(t.shape)
    if transpose_output:
        shape[:2] = shape[1::-1]
    output = t.new_empty(shape)
    output = output.transpose(0, 1) if transpose_output else output
    _kernel(kind, back)(output, t, *others, *_LAYOUT)
    return output


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kind, transpose_output, t, *others):
        ctx.kind, ctx.transpose_output = kind, transpose_output
        ctx.save_for_backward(*(o for o in others if isinstance(o, torch.Tensor)))
        ctx.rest = [o for o in others if not isinstance(o, torch.Tensor)]
        return _run(kind, False, t, others, transpose_output)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        others = (*ctx.saved_tensors, *ctx.rest)
        gradient = _run(ctx.kind, True, grad, others, ctx.transpose_output)
        return (None, None, gradient, *(None for _ in others))


def rope(t, freqs, transpose_output):
    """fused_apply_rotary_pos_emb by aiter."""
    return _Turn.apply("", transpose_output, t, freqs)


def rope_cached(t, cos, sin, transpose_output):
    """fused_apply_rotary_pos_emb_cached by aiter."""
    return _Turn.apply("cached_", transpose_output, t, cos, sin)


def rope_thd(t, cu_seqlens, freqs):
    """fused_apply_rotary_pos_emb_thd by aiter."""
    return _Turn.apply("thd_", False, t, cu_seqlens, freqs)


def rope_2d(t, height, width, cos_h, sin_h, cos_w, sin_w):
    """fused_apply_rotary_pos_emb_2d by aiter."""
    return _Turn.apply("2d_", False, t, cos_h, sin_h, cos_w, sin_w, height, width)
