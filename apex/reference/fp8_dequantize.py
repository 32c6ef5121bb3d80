"""FP8 back to numbers, in plain PyTorch: the op over apex/reference/fp8.py."""

import torch

from apex.reference import fp8

NO_DERIVATIVE = True


def fp8_dequantize(input, scale_inv, dtype=None):
    """input * scale_inv, multiplied in float32, in `dtype`: float32 (None), float16 or bfloat16.

    input: [..., columns] FP8. scale_inv: float32, one element. Raises ValueError and TypeError.
    """
    return fp8.dequantize(input, scale_inv, dtype or torch.float32)
