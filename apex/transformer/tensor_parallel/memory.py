"""Memory that is allocated once, for tensors that come and go together."""

from __future__ import annotations

import torch
import torch.distributed as dist

from apex.transformer.log_util import get_transformer_logger
from apex.transformer.tensor_parallel.utils import current_device

_logger = get_transformer_logger(__name__)
_MEM_BUFFS: dict[str, MemoryBuffer] = {}


def allocate_mem_buff(name: str, numel: int, dtype: torch.dtype, track_usage: bool) -> MemoryBuffer:
    """A MemoryBuffer that `get_mem_buff` finds. Raises ValueError where the name is taken."""
    if name in _MEM_BUFFS:
        raise ValueError(
            f"there is a memory buffer {name!r} already: take it by get_mem_buff, or another name"
        )
    _MEM_BUFFS[name] = MemoryBuffer(name, numel, dtype, track_usage)
    return _MEM_BUFFS[name]


def get_mem_buff(name: str) -> MemoryBuffer:
    """The buffer of that name. Raises KeyError where there is none."""
    return _MEM_BUFFS[name]


class MemoryBuffer:
    """Tensors behind each other in one piece of memory, on the current GPU, or the CPU where there is none.

    Args:
        name: for logs and errors.
        numel: its elements.
        dtype: of all tensors in it.
        track_usage: whether get_data counts how much of it is used.

    Attributes:
        data: [numel], all of its memory.
    """

    def __init__(self, name: str, numel: int, dtype: torch.dtype, track_usage: bool) -> None:
        self.name, self.numel, self.dtype, self.track_usage = name, numel, dtype, track_usage
        self.data = torch.empty(numel, dtype=dtype, device=current_device(), requires_grad=False)
        self.in_use_value = self.total_value = 0.0
        self._start = 0
        if _is_first_rank():
            megabytes = self.data.nbytes / 2**20
            _logger.info(f"memory buffer {name!r}: {numel} elements of {dtype}, {megabytes:.1f} MiB")

    def reset(self) -> None:
        """Empties it. The next tensors are written over those that were in it."""
        self._start = 0

    def is_in_use(self) -> bool:
        """Whether it holds a tensor."""
        return self._start > 0

    def numel_in_use(self) -> int:
        """Elements of the tensors in it."""
        return self._start

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies a tensor into it, without its history. Returns the copy, of the same shape.

        Raises TypeError for another dtype, ValueError where there is no room.
        """
        if tensor.dtype != self.dtype:
            raise TypeError(f"memory buffer {self.name!r} holds {self.dtype}, not {tensor.dtype}")
        if tensor.numel() > self.numel - self._start:
            raise ValueError(
                f"memory buffer {self.name!r} has room for {self.numel - self._start} more elements, not for "
                f"{tensor.numel()}: reset it, or allocate a larger one"
            )
        place = self.data.narrow(0, self._start, tensor.numel()).view(tensor.shape)
        self._start += tensor.numel()
        with torch.no_grad():
            return place.copy_(tensor)

    def get_data(self) -> torch.Tensor:
        """[numel_in_use()], what is in it."""
        if self.track_usage:
            self.in_use_value += self._start
            self.total_value += self.numel
        return self.data.narrow(0, 0, self._start)

    def print_average_usage(self) -> None:
        """Prints, on rank 0, how much of it was used when get_data was called. Raises RuntimeError if not tracked."""
        if not self.track_usage:
            raise RuntimeError(f"memory buffer {self.name!r} was made with track_usage=False")
        if _is_first_rank():
            used = 100.0 * self.in_use_value / self.total_value if self.total_value else 0.0
            print(f" > usage of {self.name} memory buffer: {used:.2f} %", flush=True)


class RingMemBuffer:
    """Buffers "name 0", "name 1", ... that take turns; see MemoryBuffer."""

    def __init__(
        self, name: str, num_buffers: int, numel: int, dtype: torch.dtype, track_usage: bool
    ) -> None:
        self.num_buffers = num_buffers
        self.buffers = [
            allocate_mem_buff(f"{name} {i}", numel, dtype, track_usage) for i in range(num_buffers)
        ]
        self._index = -1

    def get_next_buffer(self) -> MemoryBuffer:
        """The one whose turn it is. Raises RuntimeError where it still holds tensors."""
        self._index = (self._index + 1) % self.num_buffers
        buffer = self.buffers[self._index]
        if buffer.is_in_use():
            raise RuntimeError(f"memory buffer {buffer.name!r} is still in use: reset it first")
        return buffer


def _is_first_rank():
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
