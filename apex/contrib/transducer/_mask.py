"""Dropout of the joint: its mask as public apex shows it."""

from __future__ import annotations

import torch

from apex.reference import _masks


def mask_of(output, bits, relu):
    """1 where a value passed ReLU and dropout, 0 where not and in rows that no item has: uint8 of the output's shape.

    bits: the op's packed mask, without elements where nothing was dropped.
    """
    if bits.numel():
        return _masks.unpack(bits, output.shape[-1]).to(torch.uint8)
    return (output > 0).to(torch.uint8) if relu else torch.ones_like(output, dtype=torch.uint8)
