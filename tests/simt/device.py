"""What a kernel's test sees: a device with memory and launches, whatever runs behind it.

Behind it is a *service*: the SIMT executor in this process, one in a child process (AddressSanitizer), or the
emulator of AMD machine code. A service has ``warp_size`` and the methods ``allocate``, ``write``, ``read``,
``free`` and ``launch``; addresses are integers, valid in the service's process.
"""

from __future__ import annotations

import ctypes
import math

import numpy as np


class KernelFault(RuntimeError):
    """A launch did something that a kernel may not do: the text says what, and where."""


class Buffer:
    """Device memory with a dtype and a shape.

    `address` is what kernels take; it goes into structs by value and into tables too.
    """

    def __init__(self, service, address: int, dtype: np.dtype, shape: tuple[int, ...]):
        self._service = service
        self.address = address
        self.dtype = dtype
        self.shape = shape
        self.nbytes = math.prod(shape) * dtype.itemsize

    def numpy(self) -> np.ndarray:
        """A copy of what the buffer holds now."""
        return (
            np.frombuffer(self._service.read(self.address, self.nbytes), self.dtype)
            .reshape(self.shape)
            .copy()
        )

    def fill_from(self, array: np.ndarray) -> None:
        """Overwrites the buffer.

        Raises:
            ValueError: the array has another dtype or shape.
        """
        if array.dtype != self.dtype or array.shape != self.shape:
            raise ValueError(
                f"buffer is {self.dtype}{list(self.shape)}, array is {array.dtype}{list(array.shape)}"
            )
        self._service.write(self.address, np.ascontiguousarray(array).tobytes())


def _encode(argument):
    """An argument as services take it: bytes, or a plain int or float, packed there."""
    if argument is None:
        return bytes(8)
    if isinstance(argument, Buffer):
        return argument.address.to_bytes(8, "little")
    if isinstance(argument, np.generic):
        return argument.tobytes()
    if isinstance(argument, bool):
        return int(argument)
    if isinstance(argument, (int, float)):
        return argument
    return bytes(argument)  # a ctypes scalar or structure


def _three(size) -> tuple[int, int, int]:
    size = tuple(size) if isinstance(size, (tuple, list)) else (size,)
    return (*map(int, size), *(1,) * (3 - len(size)))


class Device:
    """One test's device. Every buffer is an allocation of its own, so that an overrun meets a guard.

    Attributes:
        name: for messages ("asan-64-descending", "emulated-gfx950").
        warp_size: 32 or 64.
        order: 0 threads ascending, 1 descending, else a pseudo-random order.
        emulated: True where machine code runs, not the source.
        service: what runs behind it.
    """

    def __init__(self, service, name: str, order: int = 0, emulated: bool = False):
        self.service = service
        self._allocated: list[int] = []
        self.name = name
        self.order = order
        self.emulated = emulated
        self.warp_size: int = service.warp_size

    def put(self, array, offset: int = 0) -> Buffer:
        """Copies an array to the device.

        Args:
            array: anything numpy takes; bfloat16 as uint16 bits (see element_types.py).
            offset: bytes past a 16-byte boundary at which the buffer begins, for unaligned views.
        """
        array = np.ascontiguousarray(array).reshape(np.shape(array))
        address = self.service.allocate(array.nbytes, offset)
        self._allocated.append(address)
        buffer = Buffer(self.service, address, array.dtype, array.shape)
        if array.nbytes:
            self.service.write(address, array.tobytes())
        return buffer

    def full(self, shape, value, dtype=np.float32, offset: int = 0) -> Buffer:
        """A buffer that holds `value` everywhere: outputs start as something that no kernel writes."""
        return self.put(np.full(shape, value, dtype), offset)

    def addresses(self, buffers) -> Buffer:
        """A table of device addresses (uint64), in device memory; None becomes 0."""
        return self.put(np.array([b.address if b is not None else 0 for b in buffers], np.uint64))

    def launch(self, kernel: str, grid, block, arguments, shared: int = 0) -> None:
        """Runs a kernel to its end.

        Args:
            kernel: its name.
            grid, block: a number or up to three; the grid is counted in blocks.
            arguments: in the kernel's order: buffers (their address), None (a null pointer), numpy or ctypes
                scalars, ctypes structures by value, plain int or float (take the parameter's size).
            shared: bytes of dynamic shared memory.

        Raises:
            KernelFault: a deadlock, race, bad access, sanitizer report or bad launch.
        """
        encoded = [_encode(a) for a in arguments]
        self.service.launch(kernel, _three(grid), _three(block), encoded, shared, self.order)

    def close(self) -> None:
        """Frees every buffer."""
        while self._allocated:
            self.service.free(self._allocated.pop())


def pack(value, size: int) -> bytes:
    """A plain int or float as a parameter of `size` bytes; bytes of the right length as they are.

    Raises:
        TypeError: the length differs, or a float has no form of that size.
    """
    if isinstance(value, float):
        if size not in (4, 8):
            raise TypeError(f"a float argument for a parameter of {size} bytes")
        return bytes(ctypes.c_float(value) if size == 4 else ctypes.c_double(value))
    if isinstance(value, int):
        return (value & (1 << 8 * size) - 1).to_bytes(size, "little")
    if len(value) != size:
        raise TypeError(f"an argument of {len(value)} bytes for a parameter of {size}")
    return value
