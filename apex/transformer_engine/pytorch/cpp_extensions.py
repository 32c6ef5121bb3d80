"""The public engine's casts by the state of a layer."""

from __future__ import annotations

import torch

from apex.transformer_engine.pytorch import _casts
from apex.transformer_engine.pytorch._scaling import Scaling

__all__ = ["cast_from_fp8", "cast_to_fp8"]


def cast_to_fp8(
    inp: torch.Tensor,
    fp8_meta_tensor: Scaling,
    fp8_tensor: int,
    otype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """inp in FP8, by the scale of tensor `fp8_tensor` of a layer's fp8_meta, whose magnitude is recorded.

    inp: [..., columns] float32, float16 or bfloat16. otype: one of torch's FP8 dtypes. out: where the codes go, of
    inp's shape and of otype or uint8; None: a new tensor of otype. Raises TypeError and ValueError.
    """
    row = fp8_meta_tensor.amax_history[0, fp8_tensor]
    scale = fp8_meta_tensor.scale[fp8_tensor]
    with torch.no_grad():
        codes = _casts.quantize(inp.detach(), scale, otype, row)
        if out is None:
            return codes
        if out.shape != inp.shape or out.dtype not in (otype, torch.uint8):
            wanted = f"{otype} or uint8 of shape {list(inp.shape)}"
            raise ValueError(f"cast_to_fp8: out must be {wanted}, not {out.dtype} of shape {list(out.shape)}")
        return out.view(torch.uint8).copy_(codes.view(torch.uint8))


def cast_from_fp8(
    inp: torch.Tensor, fp8_meta_tensor: Scaling, fp8_tensor: int, itype: torch.dtype, otype: torch.dtype
) -> torch.Tensor:
    """The numbers of codes inp (of dtype itype, or uint8), by the scale of tensor `fp8_tensor`, in otype."""
    with torch.no_grad():
        return _casts.dequantize(inp.view(itype), fp8_meta_tensor.scale_inv[fp8_tensor], otype)
