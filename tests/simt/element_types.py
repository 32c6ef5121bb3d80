"""Element types of kernels as numpy sees them. bfloat16 travels as its bits, in uint16."""

from __future__ import annotations

import numpy as np


def to_bfloat16(x) -> np.ndarray:
    """float32 values rounded to nearest even, as uint16 bits; NaN stays a NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).reshape(np.shape(x))
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), (bits >> 16).astype(np.uint16) | np.uint16(0x40), rounded)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """uint16 bits of bfloat16 as float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


# How an element type is written in a kernel's name; "bf16" arrays hold bits.
DTYPES = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),
    "f64": np.dtype(np.float64),
}
# Half a unit in the last place, relative: what rounding a result to the type may cost.
ROUNDING = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8, "f64": 2.0**-53}


def encode(x, name: str) -> np.ndarray:
    """Values as an array of the element type called `name`."""
    return to_bfloat16(x) if name == "bf16" else np.asarray(x, DTYPES[name])


def decode(x: np.ndarray, name: str) -> np.ndarray:
    """An array of the element type called `name` as float64."""
    return (from_bfloat16(x) if name == "bf16" else x).astype(np.float64)
