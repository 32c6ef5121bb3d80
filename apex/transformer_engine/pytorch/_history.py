"""Where the histories of layers lie: each column whole, and one history behind the other, as layers are made.

So one launch makes the new scales of any number of layers (csrc/host/fp8_multi_update_scales.h). Each history is a
tensor with a storage of its own all the same: what writes into one, saves or copies it knows of no other.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from apex._functional import is_traced

_NUMBERS = 2**18  # float32 of a block, 1 MiB: what a single layer that lives on keeps of models that are gone


class _Block:
    """Memory whose first `taken` numbers are histories'."""

    def __init__(self, device: torch.device) -> None:
        made = torch.empty(_NUMBERS, dtype=torch.float32, device=device)
        self.device, self.memory, self.taken = made.device, made.untyped_storage(), 0


# The block of each device and stream that is being filled; it lives as long as one of its histories. Of a stream: torch
# may give it memory that earlier work of that stream still uses.
_open: weakref.WeakValueDictionary[tuple[torch.device, int], _Block] = weakref.WeakValueDictionary()
_orders = itertools.count(1)


def zeros(length: int, count: int, device: torch.device) -> tuple[torch.Tensor, tuple[int, Any]]:
    """(a history [length, count], (a number that is larger the later it was made, what must live as long))"""
    if length * count > _NUMBERS or not _is_shared(device):
        return torch.zeros(count, length, dtype=torch.float32, device=device).t(), (0, None)
    with torch.inference_mode(False), torch.no_grad():
        made = torch.empty(0, dtype=torch.float32, device=device)
        storage, block = _take(length * count, made.device)
        made.set_(storage, 0, (length, count), (1, length)).zero_()
    return made, (next(_orders), block)


def _is_shared(device):
    """Whether what is made now may lie beside what was made before: nothing traces, and it has numbers of its own."""
    device = torch.device(device)
    if device.type not in ("cpu", "cuda") or is_traced() or torch._C._len_torch_dispatch_stack():
        return False
    if torch._C._functorch.maybe_current_level() is not None:
        return False
    return device.type == "cpu" or not torch.cuda.is_current_stream_capturing()


def _take(numbers, device):
    key = device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    block = _open.pop(key, None)  # taken out while in use: two threads never share one
    if block is None or block.taken + numbers > _NUMBERS:
        block = _Block(device)
    first, block.taken = block.taken, block.taken + numbers
    _open[key] = block
    return block.memory[4 * first : 4 * block.taken], block
