"""Numbers as their bits: float32 as bfloat16 and what that leaves out, and floats of one byte (e5m2)."""

from __future__ import annotations

import torch


def split_remainders(values):
    """(bfloat16, int16) of float32: the nearest, halves up, and the lower 16 bits, with which it is exact."""
    bits = values.view(torch.int32)
    rounded = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return rounded, bits.to(torch.int16)


def join_remainders(rounded, remainders):
    """The float32 that `split_remainders` was given."""
    low = remainders.to(torch.int32)
    high = rounded.view(torch.int16).to(torch.int32)
    return ((high << 16) + low).view(torch.float32)


def to_e5m2(values):
    """uint8 of floating-point values: the nearest numbers of five bits of exponent and two of mantissa, the upper half
    of a float16; what is too large becomes inf."""
    return values.to(torch.float8_e5m2).view(torch.uint8)


def from_e5m2(values, dtype):
    """uint8 of `to_e5m2` as a floating-point dtype, exactly."""
    return values.view(torch.float8_e5m2).to(dtype)
