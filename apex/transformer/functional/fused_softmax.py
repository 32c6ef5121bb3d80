"""Softmax of attention scores with scale and mask in one kernel, with public apex's names and signatures.

Scores are float16, bfloat16, float32 or float64, of any shape; sums are float32 (float64 for float64). A mask is
bool or uint8, true where a key is left out, and broadcasts to the scores; no value is read through it, and a row
that it leaves nothing of is zeros, as is its gradient. Gradients are fresh tensors: the one that comes in stays as
it is. Under autocast scores are cast to its dtype first. CPU tensors take the CPU variant of the same op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from apex import _symbolic as symbolic
from apex._functional import Function, call
from apex.transformer.enums import AttnMaskType

_forward = torch.ops.apex.scaled_masked_softmax_forward.default


def _softmax(inputs, mask, scale, causal):
    return call("scaled_masked_softmax", _forward, 1, (inputs, mask, float(scale), causal))


class ScaledUpperTriangMaskedSoftmax(Function):
    """softmax(scale * inputs) without the keys after each query.

    inputs: (..., queries, keys). Where there are more keys than queries, the last query has all of them.
    """

    @staticmethod
    def forward(ctx, inputs, scale):
        return _softmax(inputs, None, scale, True)


class ScaledMaskedSoftmax(Function):
    """softmax(scale * inputs) without the keys where the mask is true. inputs: (..., queries, keys)."""

    @staticmethod
    def forward(ctx, inputs, mask, scale):
        return _softmax(inputs, mask, scale, False)


class GenericScaledMaskedSoftmax(ScaledMaskedSoftmax):
    """The same: in public apex it is the kernel without limits on lengths, which none has here."""


class ScaledSoftmax(Function):
    """softmax(scale * inputs) over the last dimension."""

    @staticmethod
    def forward(ctx, inputs, scale):
        return _softmax(inputs, None, scale, False)


def scaled_upper_triang_masked_softmax(inputs: torch.Tensor, _: Any, scale: float) -> torch.Tensor:
    """Causal softmax of scale * inputs; the second argument, a mask, is not looked at.

    inputs: (..., queries, keys), float16, bfloat16, float32 or float64; the output has its shape and dtype. Raises
    ValueError where a dimension is missing, TypeError for another dtype.
    """
    return ScaledUpperTriangMaskedSoftmax.apply(inputs, scale)


def scaled_masked_softmax(inputs: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """softmax(scale * inputs) without the keys where the mask is true; mask may be None.

    inputs: (..., queries, keys), float16, bfloat16, float32 or float64; the output has its shape and dtype. mask: bool
    or uint8 that broadcasts to inputs. Raises ValueError where shapes, TypeError where dtypes do not fit.
    """
    return _softmax(inputs, mask, scale, False)


def generic_scaled_masked_softmax(
    inputs: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """As scaled_masked_softmax."""
    return GenericScaledMaskedSoftmax.apply(inputs, mask, scale)


class FusedScaleMaskSoftmax(torch.nn.Module):
    """Scale, mask and softmax of attention scores: by the fused kernel where it is asked for, or by torch.

    Args:
        input_in_fp16, input_in_bf16: the scores' dtype; at most one of them. The kernel is taken for these two.
        attn_mask_type: AttnMaskType.padding (the mask that is given) or causal (the fused kernel makes its own and
            does not look at the mask; torch's way uses the mask that is given, or makes the same one).
        scaled_masked_softmax_fusion: whether the kernel is wanted.
        mask_func: (scores, mask) -> masked scores, for torch's way.
        softmax_in_fp32: torch's way computes in float32. The kernel always does.
        scale: of the scores, or None; needs softmax_in_fp32.

    Raises:
        RuntimeError: both dtypes, or a scale without softmax_in_fp32.
        ValueError: fusion with another attn_mask_type.
    """

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: AttnMaskType,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None,
        softmax_in_fp32: bool,
        scale: float | None,
    ) -> None:
        super().__init__()
        if input_in_fp16 and input_in_bf16:
            raise RuntimeError("both fp16 and bf16 flags cannot be active at the same time.")
        if scale is not None and not softmax_in_fp32:
            raise RuntimeError("softmax should be in fp32 when scaled")
        self.input_in_fp16 = input_in_fp16
        self.input_in_bf16 = input_in_bf16
        self.input_in_float16 = input_in_fp16 or input_in_bf16
        self.attn_mask_type = attn_mask_type
        self.scaled_masked_softmax_fusion = scaled_masked_softmax_fusion
        self.mask_func = mask_func
        self.softmax_in_fp32 = softmax_in_fp32
        self.scale = scale
        if scaled_masked_softmax_fusion:
            if attn_mask_type == AttnMaskType.causal:
                self.fused_softmax_func: Callable = scaled_upper_triang_masked_softmax
            elif attn_mask_type == AttnMaskType.padding:
                self.fused_softmax_func = scaled_masked_softmax
            else:
                raise ValueError(f"Invalid attn_mask_type: {attn_mask_type!r} is neither padding nor causal.")

    def forward(self, input: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """input: (batch, heads, queries, keys). mask: broadcasts to it, or None. Raises ValueError."""
        node = symbolic.leaf(self, input, mask)
        if node is not None:
            return node
        if input.dim() != 4:
            raise ValueError(f"scores are (batch, heads, queries, keys), not {tuple(input.shape)}")
        if self.is_kernel_available(mask, *input.size()):
            return self.forward_fused_softmax(input, mask)
        return self.forward_torch_softmax(input, mask)

    def is_kernel_available(self, mask: torch.Tensor | None, b: int, np: int, sq: int, sk: int) -> bool:
        """Whether the kernel is taken for scores of this shape: whatever it is, if fusion is on and they are half."""
        return bool(self.scaled_masked_softmax_fusion and self.input_in_float16)

    def forward_fused_softmax(self, input: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """By the kernel."""
        return self.fused_softmax_func(input, mask, 1.0 if self.scale is None else self.scale)

    def forward_torch_softmax(self, input: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """By torch's own ops."""
        if self.input_in_float16 and self.softmax_in_fp32:
            input = input.float()
        if self.scale is not None:
            input = input * self.scale
        if mask is None and self.attn_mask_type == AttnMaskType.causal:
            queries, keys = input.shape[-2:]
            ones = torch.ones(queries, keys, dtype=torch.bool, device=input.device)
            mask = ones.triu(keys - queries + 1)
        if mask is not None:
            if self.mask_func is None:
                raise ValueError("a mask was given, and no mask_func that applies it")
            input = self.mask_func(input, mask)
        probs = torch.softmax(input, dim=-1)
        if self.input_in_float16 and self.softmax_in_fp32:
            probs = probs.half() if self.input_in_fp16 else probs.bfloat16()
        return probs

    @staticmethod
    def get_batch_per_block(sq: int, sk: int, b: int, np: int) -> int:
        """What batches or queries must be a multiple of for the kernel: 1."""
        from apex._legacy import scaled_masked_softmax_cuda

        return scaled_masked_softmax_cuda.get_batch_per_block(sq, sk, b, np)


class GenericFusedScaleMaskSoftmax(FusedScaleMaskSoftmax):
    """FusedScaleMaskSoftmax with a mask that is given. Arguments as there."""

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None,
        softmax_in_fp32: bool,
        scale: float | None,
    ) -> None:
        super().__init__(
            input_in_fp16,
            input_in_bf16,
            AttnMaskType.padding,
            scaled_masked_softmax_fusion,
            mask_func,
            softmax_in_fp32,
            scale,
        )
        if scaled_masked_softmax_fusion:
            self.fused_softmax_func = generic_scaled_masked_softmax
