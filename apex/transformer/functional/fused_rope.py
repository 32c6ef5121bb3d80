"""Rotary positional embedding with public apex's names and signatures.

Elements k and k + r/2 of a head are a pair that is turned by the angles of its place (rotate-half pairing); elements
past r are copied. The output has the input's dtype, whatever autocast says; sums are float32 (float64 for float64).
Input and gradient are read as they lie in memory, with any strides. Angles, cosines and sines may have any floating
dtype, and are constants: no gradient reaches them, as in public apex.

Source: J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864.

USE_ROCM_AITER_ROPE_BACKEND=1, set before this module is imported, hands the work on ROCm to AMD's aiter (`make aiter`
installs it), which is less exact. Where aiter is not there a warning says so, and apex's own kernels serve.
"""

from __future__ import annotations

import torch

from apex._functional import Function, call
from apex._torch_build import IS_ROCM_PYTORCH, check_if_rocm_pytorch  # noqa: F401  public names of this module
from apex.transformer.functional import _aiter

USE_ROCM_AITER_ROPE_BACKEND = _aiter.is_asked_for()
# Whether aiter serves the functions below.
AITER_ROPE_BACKEND = _aiter.load()

_op = torch.ops.apex.rope_forward.default


def _rope(t, cos, sin=None, cos_w=None, sin_w=None, cu_seqlens=None, transpose_output=False):
    return call("rope", _op, 1, (t, cos, sin, cos_w, sin_w, cu_seqlens, transpose_output))


def _check_given(function, name, tensor):
    """The op would take None to mean another form of the work."""
    if tensor is None:
        raise TypeError(f"{function}: {name} must be a tensor, not None")


# ---- classes that callers of public apex use by `apply` --------------------------------------------------------


class FusedRoPEFunc(Function):
    """By angles; see fused_apply_rotary_pos_emb."""

    @staticmethod
    def forward(
        ctx, t: torch.Tensor, freqs: torch.Tensor, transpose_output_memory: bool = False
    ) -> torch.Tensor:
        return _rope(t, freqs, transpose_output=transpose_output_memory)


class FusedRoPEFuncApex(FusedRoPEFunc):
    """By apex's kernels."""


class FusedRoPEFuncAiter(FusedRoPEFunc):
    """By aiter."""

    @staticmethod
    def forward(
        ctx, t: torch.Tensor, freqs: torch.Tensor, transpose_output_memory: bool = False
    ) -> torch.Tensor:
        return _aiter.rope(t, freqs, transpose_output_memory)


class FusedRoPECachedFunc(Function):
    """By cosines and sines; see fused_apply_rotary_pos_emb_cached."""

    @staticmethod
    def forward(
        ctx, t: torch.Tensor, cos_: torch.Tensor, sin_: torch.Tensor, transpose_output_memory: bool = False
    ) -> torch.Tensor:
        _check_given("fused_apply_rotary_pos_emb_cached", "sin_", sin_)
        return _rope(t, cos_, sin_, transpose_output=transpose_output_memory)


class FusedRoPECachedFuncApex(FusedRoPECachedFunc):
    """By apex's kernels."""


class FusedRoPECachedFuncAiter(FusedRoPECachedFunc):
    """By aiter."""

    @staticmethod
    def forward(
        ctx, t: torch.Tensor, cos_: torch.Tensor, sin_: torch.Tensor, transpose_output_memory: bool = False
    ) -> torch.Tensor:
        return _aiter.rope_cached(t, cos_, sin_, transpose_output_memory)


class FusedRoPETHDFunc(Function):
    """Packed sequences; see fused_apply_rotary_pos_emb_thd."""

    @staticmethod
    def forward(ctx, t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        _check_given("fused_apply_rotary_pos_emb_thd", "cu_seqlens", cu_seqlens)
        return _rope(t, freqs, cu_seqlens=cu_seqlens)


class FusedRoPETHDFuncApex(FusedRoPETHDFunc):
    """By apex's kernels."""


class FusedRoPETHDFuncAiter(FusedRoPETHDFunc):
    """By aiter."""

    @staticmethod
    def forward(ctx, t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        return _aiter.rope_thd(t, cu_seqlens, freqs)


class FusedRoPE2DFunc(Function):
    """Images; see fused_apply_rotary_pos_emb_2d."""

    @staticmethod
    def forward(
        ctx,
        t: torch.Tensor,
        img_h: int,
        img_w: int,
        cos_h: torch.Tensor,
        sin_h: torch.Tensor,
        cos_w: torch.Tensor,
        sin_w: torch.Tensor,
    ) -> torch.Tensor:
        return _rope(t.unflatten(1, (img_h, img_w)), cos_h, sin_h, cos_w, sin_w).flatten(1, 2)


class FusedRoPE2DFuncApex(FusedRoPE2DFunc):
    """By apex's kernels."""


class FusedRoPE2DFuncAiter(FusedRoPE2DFunc):
    """By aiter."""

    @staticmethod
    def forward(
        ctx,
        t: torch.Tensor,
        img_h: int,
        img_w: int,
        cos_h: torch.Tensor,
        sin_h: torch.Tensor,
        cos_w: torch.Tensor,
        sin_w: torch.Tensor,
    ) -> torch.Tensor:
        return _aiter.rope_2d(t, img_h, img_w, cos_h, sin_h, cos_w, sin_w)


# ---- functions ---------------------------------------------------------------------------------------------------


def fused_apply_rotary_pos_emb(
    t: torch.Tensor, freqs: torch.Tensor, transpose_output_memory: bool = False
) -> torch.Tensor:
    """Turns the pairs of every head by the angles of its place.

    Args:
        t: [s, b, h, d] float16, bfloat16, float32 or float64; any strides.
        freqs: [s, 1, 1, r], angles in radians (below 2^50), r even and at most d.
        transpose_output_memory: the output's memory is [b, s, h, d], so that `output.transpose(0, 1)` is contiguous.

    Returns:
        Tensor: [s, b, h, d] of t's dtype, differentiable in t any number of times.

    Raises:
        ValueError: shapes or devices do not fit.
        TypeError: a dtype is not floating.
    """
    chosen = FusedRoPEFuncAiter if AITER_ROPE_BACKEND else FusedRoPEFuncApex
    return chosen.apply(t, freqs, transpose_output_memory)


def fused_apply_rotary_pos_emb_cached(
    t: torch.Tensor, cos_: torch.Tensor, sin_: torch.Tensor, transpose_output_memory: bool = False
) -> torch.Tensor:
    """As fused_apply_rotary_pos_emb, by cosines and sines that were made before.

    Args:
        t: [s, b, h, d].
        cos_, sin_: [s, 1, 1, r], of one dtype, t's or another.
        transpose_output_memory: as there.
    """
    chosen = FusedRoPECachedFuncAiter if AITER_ROPE_BACKEND else FusedRoPECachedFuncApex
    return chosen.apply(t, cos_, sin_, transpose_output_memory)


def fused_apply_rotary_pos_emb_thd(
    t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor
) -> torch.Tensor:
    """As fused_apply_rotary_pos_emb, for sequences that lie one after the other; places count from each one's begin.

    Args:
        t: [t, h, d].
        cu_seqlens: int32 [sequences + 1] on t's device: where each sequence begins, from 0, and where the last ends.
            Places after that end are padding, which is copied.
        freqs: [max_s, 1, 1, r], as many places as the longest sequence has, or more.

    Raises:
        ValueError: on the CPU, also where cu_seqlens falls, does not begin at 0 or ends past t, or a sequence is
            longer than freqs. On a GPU, where looking would make the host wait, the turned elements are nan then.
    """
    chosen = FusedRoPETHDFuncAiter if AITER_ROPE_BACKEND else FusedRoPETHDFuncApex
    return chosen.apply(t, cu_seqlens, freqs)


def fused_apply_rotary_pos_emb_2d(
    t: torch.Tensor,
    img_h: int,
    img_w: int,
    cos_h: torch.Tensor,
    sin_h: torch.Tensor,
    cos_w: torch.Tensor,
    sin_w: torch.Tensor,
) -> torch.Tensor:
    """Images: the first half of every head is turned by its row in the image, the second by its column.

    Args:
        t: [b, img_h * img_w, h, d], d a multiple of 4.
        cos_h, sin_h: [1, H, 1, d / 2], H at least img_h.
        cos_w, sin_w: [1, W, 1, d / 2], W at least img_w.

    Raises:
        ValueError: shapes do not fit.
    """
    if t.dim() != 4 or t.shape[1] != img_h * img_w:
        raise ValueError(
            f"fused_apply_rotary_pos_emb_2d: t must be [b, {img_h} * {img_w}, h, d], not {list(t.shape)}"
        )
    chosen = FusedRoPE2DFuncAiter if AITER_ROPE_BACKEND else FusedRoPE2DFuncApex
    return chosen.apply(t, img_h, img_w, cos_h, sin_h, cos_w, sin_w)
