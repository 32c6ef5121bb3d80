"""Rotary position embedding of queries and keys."""

from __future__ import annotations

import torch
from torch import nn

from apex.transformer.functional import fused_apply_rotary_pos_emb, fused_apply_rotary_pos_emb_thd
from apex.transformer_engine.pytorch._parameters import device_of


class RotaryPositionEmbedding(nn.Module):
    """Angles [places, 1, 1, dim] of the places of a sequence, as apply_rotary_pos_emb takes them.

    Args:
        dim: size of a head.
        rotary_percent: what part of it is turned.
        seq_len_interpolation_factor: places are divided by it; None: 1.
        pretrained_max_position_embeddings: accepted beside the factor; longer sequences then are squeezed to it.
        rotary_base: of the wavelengths.
    """

    inv_freq: torch.Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
    ) -> None:
        super().__init__()
        if rotary_percent < 1.0:
            dim = int(dim * rotary_percent)
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        steps = torch.arange(0, dim, 2, dtype=torch.float32, device=device_of(None))
        self.register_buffer("inv_freq", 1.0 / rotary_base ** (steps / dim), persistent=False)

    def forward(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """float32 [max_seq_len, 1, 1, dim]: radians of the places from `offset` on."""
        places = torch.arange(max_seq_len, dtype=torch.float32, device=self.inv_freq.device) + offset
        known = self.pretrained_max_position_embeddings
        if known is not None and self.seq_len_interpolation_factor is not None:
            if max_seq_len > known * self.seq_len_interpolation_factor:
                places = places * (known / max_seq_len)
            else:
                places = places / self.seq_len_interpolation_factor
        elif self.seq_len_interpolation_factor is not None:
            places = places / self.seq_len_interpolation_factor
        angles = torch.outer(places, self.inv_freq.float())
        return torch.cat((angles, angles), -1).view(max_seq_len, 1, 1, -1)


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    fused: bool = True,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Turns the pairs (k, k + r / 2) of every head by the angles of its place.

    Args:
        t: [s, b, h, d], [b, s, h, d] or [t, h, d], by tensor_format "sbhd", "bshd" or "thd".
        freqs: [places, 1, 1, r], in radians; as many places as the longest sequence has, or more.
        fused: accepted; it always is.
        cu_seqlens: int32 [sequences + 1], of "thd".

    Raises ValueError for another format, fewer angles than places, or "thd" without cu_seqlens.
    """
    if tensor_format == "thd":
        if cu_seqlens is None:
            raise ValueError('tensor_format="thd" needs cu_seqlens')
        return fused_apply_rotary_pos_emb_thd(t, cu_seqlens, freqs)
    if tensor_format not in ("sbhd", "bshd"):
        raise ValueError(f"tensor_format must be 'sbhd', 'bshd' or 'thd', not {tensor_format!r}")
    turned = t if tensor_format == "sbhd" else t.transpose(0, 1)
    if turned.shape[0] > freqs.shape[0]:
        raise ValueError(f"the sequence has {turned.shape[0]} places, the rotary embedding {freqs.shape[0]}")
    found = fused_apply_rotary_pos_emb(turned, freqs[: turned.shape[0]])
    return found if tensor_format == "sbhd" else found.transpose(0, 1)
