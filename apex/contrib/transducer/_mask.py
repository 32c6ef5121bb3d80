"""Dropout of the joint: its random numbers' key, and its mask as public apex shows it."""

from __future__ import annotations

import torch

from apex.reference import _masks


def new_seed(device):
    """A key drawn from torch's generator of that device, on the device: a CUDA graph draws another at every replay."""
    return torch.randint(2**62, (1,), dtype=torch.int64, device=device)


def mask_of(output, bits, relu):
    """1 where a value passed ReLU and dropout, 0 where not and in rows that no item has: uint8 of the output's shape.

    bits: the op's packed mask, without elements where nothing was dropped.
    """
    if bits.numel():
        return _masks.unpack(bits, output.shape[-1]).to(torch.uint8)
    return (output > 0).to(torch.uint8) if relu else torch.ones_like(output, dtype=torch.uint8)
