"""torch.fft: float32, for half precision has kernels for few sizes and few devices."""

import torch

MODULE = torch.fft

FP16_FUNCS = []

BFLOAT16_FUNCS = []

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

CASTS = []

SEQUENCE_CASTS = []
