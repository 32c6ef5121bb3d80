"""Keys of the kernels' random numbers (csrc/device/philox.h)."""

from __future__ import annotations

import torch


def new_seed(device):
    """A key drawn from torch's generator of that device, on the device: a CUDA graph draws another at every replay."""
    return torch.randint(2**62, (1,), dtype=torch.int64, device=device)
