"""Which keys a query does not look at, and what is added to scores."""

from __future__ import annotations

import math
from typing import Any

import torch

# name -> (padding, causal, whether the diagonal ends in the last query's last key)
KINDS = {
    "no_mask": (False, False, True),
    "arbitrary": (True, False, True),
    "padding": (True, False, True),
    "causal": (False, True, False),
    "padding_causal": (True, True, False),
    "causal_bottom_right": (False, True, True),
    "padding_causal_bottom_right": (True, True, True),
}


def kind_of(name: str) -> str:
    """The name, of which the parts of "padding,causal" are other ways to write it. Raises ValueError."""
    found = "padding_causal" if name in ("padding,causal", "causal,padding") else name
    if found not in KINDS:
        raise ValueError(f"attn_mask_type must be one of {', '.join(KINDS)}, not {name!r}")
    return found


def window_of(kind: str, window: tuple[int, int] | None) -> tuple[int, int]:
    """(keys before, keys after) that are seen; -1: all. Causal ones see none after. Raises ValueError."""
    left, right = (-1, -1) if window is None else window
    if left < -1 or right < -1:
        raise ValueError(f"window_size must be numbers from -1 on, not {window}")
    return (left, 0) if KINDS[kind][1] else (left, right)


def check_mask(mask: Any, kind: str) -> None:
    """Raises ValueError where there is none, and the kind needs one."""
    if KINDS[kind][0] and mask is None:
        raise ValueError(f"attn_mask_type={kind!r} needs an attention_mask")


def padding_mask(mask: Any, kind: str) -> torch.Tensor | None:
    """One mask, true where a key is left out, of what may be a pair ([b, 1, 1, queries], [b, 1, 1, keys])."""
    if not KINDS[kind][0]:
        return None
    if isinstance(mask, tuple):
        queries, keys = mask
        return queries.bool().transpose(-1, -2) | keys.bool()
    return mask.bool()


def lengths_of(mask: Any, kind: str) -> tuple[Any, Any] | None:
    """How many (queries, keys) of each sequence are none of padding, [b, 1, 1, 1]; None where all are."""
    if kind == "arbitrary" or not KINDS[kind][0]:
        return None
    queries, keys = mask if isinstance(mask, tuple) else (mask, mask)
    if keys.dim() != 4 or keys.shape[-2] != 1:
        return None
    return tuple((~t.bool()).sum(-1, keepdim=True) for t in (queries, keys))  # type: ignore[return-value]


def distance(queries: int, keys: int, lengths: Any, bottom_right: bool, device: torch.device) -> torch.Tensor:
    """[..., queries, keys]: how far behind a query's own place a key is; negative ones are before it."""
    rows = torch.arange(queries, dtype=torch.int64, device=device).view(-1, 1)
    columns = torch.arange(keys, dtype=torch.int64, device=device).view(1, -1)
    if not bottom_right:
        return columns - rows
    shift = keys - queries if lengths is None else lengths[1] - lengths[0]
    return columns - rows - shift


def left_out(
    kind: str, window: tuple[int, int], mask: Any, queries: int, keys: int, device: torch.device
) -> torch.Tensor | None:
    """True where a query does not look at a key; None: it looks at all."""
    found = padding_mask(mask, kind)
    left, right = window
    if left < 0 and right < 0:
        return found
    place = distance(queries, keys, lengths_of(mask, kind), KINDS[kind][2], device)
    outside = torch.zeros_like(place, dtype=torch.bool)
    if left >= 0:
        outside = outside | (place < -left)
    if right >= 0:
        outside = outside | (place > right)
    return outside if found is None else found | outside


def alibi_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """[heads], of O. Press et al., "Train Short, Test Long", arXiv:2108.12409: powers of 2^(-8 / heads)."""
    near = 2 ** math.floor(math.log2(heads))
    found = [2.0 ** (-8.0 * (i + 1) / near) for i in range(near)]
    found += [2.0 ** (-4.0 * (2 * i + 1) / near) for i in range(heads - near)]
    return torch.tensor(found, dtype=torch.float32, device=device)


def alibi(slopes: torch.Tensor, queries: int, keys: int, lengths: Any, bottom_right: bool) -> torch.Tensor:
    """[b or 1, heads, queries, keys]: minus the slope times how far a key is away. slopes: [heads] or [b, heads]."""
    away = distance(queries, keys, lengths, bottom_right, slopes.device).abs()
    return -slopes.view(-1, slopes.shape[-1], 1, 1) * away
