from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class MultiTensorApply:
    """``applier(amp_C.multi_tensor_scale, noop_flag, [inputs, outputs], 0.5)``.

    chunk_size is handed to the function, as in public apex; the functions cut tensors into chunks of their own.
    Always available: an op without a kernel here runs on its reference.
    """

    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Does nothing: kept for callers of public apex."""

    def __call__(
        self,
        op: Callable,
        noop_flag_buffer: torch.Tensor,
        tensor_lists: Sequence[Sequence[torch.Tensor]],
        *args: Any,
    ) -> Any:
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)
