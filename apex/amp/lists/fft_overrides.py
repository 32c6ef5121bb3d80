"""torch.fft: float32, for half precision has kernels for few sizes and few devices."""

import torch

MODULE = torch.fft

FP16_FUNCS: list[str] = []

BFLOAT16_FUNCS: list[str] = []

FP32_FUNCS = [
    "fft",
    "fft2",
    "fftn",
    "hfft",
    "hfft2",
    "hfftn",
    "ifft",
    "ifft2",
    "ifftn",
    "ihfft",
    "ihfft2",
    "ihfftn",
    "irfft",
    "irfft2",
    "irfftn",
    "rfft",
    "rfft2",
    "rfftn",
]

CASTS: list[str] = []

SEQUENCE_CASTS: list[str] = []
