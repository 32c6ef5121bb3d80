"""The public engine's names of dtypes, and of the tensors of a layer's products."""

from __future__ import annotations

import dataclasses
import enum

import torch

from apex.transformer_engine.pytorch import _formats

__all__ = [
    "AttnBiasTypes",
    "AttnMaskTypes",
    "AttnTypes",
    "DType",
    "FP8BwdTensors",
    "FP8FwdTensors",
    "FP8TensorMeta",
    "GemmParallelModes",
    "LayerTypes",
    "TE_DType",
    "fp8_dtype",
    "torch_dtype",
]


class DType(enum.IntEnum):
    """Dtypes of tensors, by the numbers of the engine's C interface."""

    kByte = 0
    kInt32 = 1
    kInt64 = 2
    kFloat32 = 3
    kFloat16 = 4
    kBFloat16 = 5
    kFloat8E4M3 = 6
    kFloat8E5M2 = 7


_PRODUCTS = (1, 2, 3)
_OF_PRODUCTS = [f"GEMM{n}_{what}" for n in _PRODUCTS for what in ("INPUT", "WEIGHT", "OUTPUT")]
FP8FwdTensors = enum.IntEnum("FP8FwdTensors", _OF_PRODUCTS, start=0)  # type: ignore[misc]
_OF_GRADIENTS = [f"GRAD_{what}{n}" for n in _PRODUCTS for what in ("OUTPUT", "INPUT")]
FP8BwdTensors = enum.IntEnum("FP8BwdTensors", _OF_GRADIENTS, start=0)  # type: ignore[misc]


@dataclasses.dataclass
class FP8TensorMeta:
    """What delayed scaling knows of `n` tensors: scale [n], scale_inv [n], amax_history [steps, n]; all float32."""

    scale: torch.Tensor | None = None
    scale_inv: torch.Tensor | None = None
    amax_history: torch.Tensor | None = None


TE_DType = {
    torch.uint8: DType.kByte,
    torch.int32: DType.kInt32,
    torch.int64: DType.kInt64,
    torch.float32: DType.kFloat32,
    torch.float16: DType.kFloat16,
    torch.bfloat16: DType.kBFloat16,
    torch.float8_e4m3fn: DType.kFloat8E4M3,
    torch.float8_e4m3fnuz: DType.kFloat8E4M3,
    torch.float8_e5m2: DType.kFloat8E5M2,
    torch.float8_e5m2fnuz: DType.kFloat8E5M2,
}
_PLAIN = (torch.uint8, torch.int32, torch.int64, torch.float32, torch.float16, torch.bfloat16)

AttnMaskTypes = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)
AttnTypes = ("self", "cross")
AttnBiasTypes = ("pre_scale_bias", "post_scale_bias", "no_bias", "alibi")
LayerTypes = ("encoder", "decoder")
GemmParallelModes = ("row", "column", None)


def torch_dtype(dtype: DType | torch.dtype, device: torch.device) -> torch.dtype:
    """The torch dtype of a DType: of FP8, that which the device has (FNUZ on gfx942); a torch dtype is itself.

    Raises TypeError for what is neither.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    try:
        number = int(dtype)
    except (TypeError, ValueError):
        raise TypeError(f"the dtype must be a DType or a torch.dtype, not {dtype!r}") from None
    if number in (DType.kFloat8E4M3, DType.kFloat8E5M2):
        return _formats.formats(device)[number - DType.kFloat8E4M3]
    if not 0 <= number < len(_PLAIN):
        raise TypeError(f"the dtype must be a DType or a torch.dtype, not {dtype!r}")
    return _PLAIN[number]


def fp8_dtype(dtype: DType | torch.dtype, device: torch.device) -> torch.dtype:
    """The same, of FP8 alone. Raises TypeError for another dtype."""
    found = torch_dtype(dtype, device)
    if TE_DType.get(found) not in (DType.kFloat8E4M3, DType.kFloat8E5M2):
        raise TypeError(
            f"the dtype must be kFloat8E4M3, kFloat8E5M2 or one of torch's FP8 dtypes, not {dtype!r}"
        )
    return found
