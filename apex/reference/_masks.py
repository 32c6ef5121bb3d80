"""Masks of one bit an element: uint8, [..., ceil(columns / 8)], bit i of byte j for column 8 j + i."""

import torch


def unpack(mask, columns):
    """[..., columns] bool."""
    bits = (mask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=mask.device)) & 1
    return bits.flatten(-2)[..., :columns].bool()


def pack(bits):
    """The mask of a [..., columns] tensor: a bit is set where it is not 0."""
    padded = torch.nn.functional.pad((bits != 0).to(torch.uint8), (0, -bits.shape[-1] % 8))
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (padded.unflatten(-1, (-1, 8)) * weights).sum(-1, dtype=torch.uint8)
