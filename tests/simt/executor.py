"""The SIMT executor from Python: loads a built library, holds memory for its kernels, launches them."""

from __future__ import annotations

import ctypes
import mmap
import pathlib

from simt.build import FLAVOURS, build
from simt.device import KernelFault, pack

_PAGE = mmap.PAGESIZE
_ALIGNMENT = 16
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]
_MAP_NORESERVE = 0x4000
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_NO_ACCESS = 0


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


class _PageMemory:
    """Each allocation ends, up to 16 bytes, at a page that faults, and begins after one.

    Huge ones cost nothing until they are touched, which is how 64-bit indexing is tested.
    """

    def __init__(self):
        self._maps: dict[int, tuple[int, int]] = {}

    def allocate(self, nbytes: int, offset: int) -> int:
        body = _up(max(nbytes + offset, 1), _PAGE)
        total = body + 2 * _PAGE
        start = _libc.mmap(
            None, total, _READ_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0
        )
        if start in (None, ctypes.c_void_p(-1).value):
            raise MemoryError(f"{nbytes} bytes of device memory")
        _libc.mprotect(start, _PAGE, _NO_ACCESS)
        _libc.mprotect(start + _PAGE + body, _PAGE, _NO_ACCESS)
        address = start + _PAGE + body - _up(nbytes + offset, _ALIGNMENT) + offset
        self._maps[address] = (start, total)
        return address

    def free(self, address: int) -> None:
        _libc.munmap(*self._maps.pop(address))


class _SanitizedMemory:
    """AddressSanitizer's malloc: exact to the byte."""

    def __init__(self):
        self._starts: dict[int, int] = {}

    def allocate(self, nbytes: int, offset: int) -> int:
        start = _libc.malloc(nbytes + offset)
        if not start:
            raise MemoryError(f"{nbytes} bytes of device memory")
        self._starts[start + offset] = start
        return start + offset

    def free(self, address: int) -> None:
        _libc.free(self._starts.pop(address))


class Executor:
    """One flavour of the executor, loaded into this process.

    Attributes:
        warp_size: 32 or 64.
        entry: the function that `apex_set_executor` of libapex takes.
        library: what was built, with the units that failed to compile.
    """

    def __init__(self, flavour: str, warp_size: int, sources: list[str] | None = None):
        """
        Args:
            flavour: a key of build.FLAVOURS. "asan" loads only under build.sanitizer_preload().
            warp_size: 32 or 64.
            sources: device sources; None: all of csrc/device.
        """
        paths = None if sources is None else [pathlib.Path(s) for s in sources]
        self.library = build(flavour, warp_size, paths)
        self.warp_size = warp_size
        self._functions = ctypes.CDLL(str(self.library.path))
        self.entry = self._functions.simt_launch
        self.entry.restype = ctypes.c_char_p
        self._functions.simt_kernel_name.restype = ctypes.c_char_p
        self._functions.simt_parameter_bytes.restype = ctypes.c_size_t
        self._memory = _SanitizedMemory() if FLAVOURS[flavour].sanitized else _PageMemory()

    def kernel_names(self) -> list[str]:
        """Every kernel in the library, sorted."""
        names = []
        while (name := self._functions.simt_kernel_name(len(names))) is not None:
            names.append(name.decode())
        return names

    def launch(self, kernel: str, grid, block, arguments, shared: int = 0, order: int = 0) -> None:
        """Runs a kernel; arguments are bytes, ints or floats. See Device.launch.

        Raises:
            KernelFault: what the executor said, or what kept the kernel's unit from compiling.
            TypeError: the arguments do not fit the kernel's parameters.
        """
        name = kernel.encode()
        count = self._functions.simt_parameter_count(name)
        if count < 0:
            broken = "".join(
                f"\n{unit}: {text}" for unit, text in self.library.failures.items() if kernel.startswith(unit)
            )
            raise KernelFault(f"no kernel {kernel}{broken}")
        if count != len(arguments):
            raise TypeError(f"{kernel} takes {count} arguments, {len(arguments)} given")
        values = [pack(a, self._functions.simt_parameter_bytes(name, i)) for i, a in enumerate(arguments)]
        pointers = (ctypes.c_void_p * max(count, 1))(
            *(ctypes.cast(ctypes.c_char_p(v), ctypes.c_void_p) for v in values)
        )
        sizes = [ctypes.c_uint(n) for n in (*grid, *block)]
        error = self.entry(name, *sizes, ctypes.c_size_t(shared), ctypes.c_uint(order), pointers)
        if error:
            raise KernelFault(f"{kernel}: {error.decode(errors='replace')}")

    def only_block(self, linear_index: int) -> None:
        """From now on launches run only this block; -1: all again."""
        self._functions.simt_only_block(ctypes.c_longlong(linear_index))

    def time_limit(self, seconds: float) -> None:
        """CPU time that a launch may take."""
        self._functions.simt_time_limit(ctypes.c_double(seconds))

    def allocate(self, nbytes: int, offset: int) -> int:
        return self._memory.allocate(nbytes, offset)

    def free(self, address: int) -> None:
        self._memory.free(address)

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def read(self, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)
