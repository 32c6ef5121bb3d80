"""The service (see simt/device.py) that runs AMD code objects instruction by instruction on the CPU.

The emulator is no part of this project: ``APEX_AMD_EMULATOR`` names the folder of its run_hsaco.py, and
``TINYGRAD_SRC`` the tinygrad checkout that it takes the instructions' meaning from.
"""

from __future__ import annotations

import os
import pathlib
import sys

import numpy as np
from simt.device import KernelFault, pack

from emulated.toolchain import ROOT, compile_source

_WAVE_ORDERS = {0: {}, 1: {"seed": 1, "quantum": 1}}  # waves as far as they can, one by one; or all in turns


class Emulator:
    """One arch. Code objects are compiled and loaded at their first launch.

    Attributes:
        warp_size: 64 on gfx9, else 32.
    """

    def __init__(self, arch: str, sources: list[str] | None = None):
        """
        Args:
            arch: gfx950, gfx1100 or gfx1201.
            sources: device sources; None: all of csrc/device.
        """
        sys.path.insert(0, os.environ["APEX_AMD_EMULATOR"])
        import run_hsaco

        self._emulator = run_hsaco
        self._arch = arch
        paths = (ROOT / "csrc" / "device").glob("*.cu") if sources is None else map(pathlib.Path, sources)
        self._sources = {path.stem: path for path in paths}
        self._objects: dict[str, object] = {}
        self._kernels: dict[str, object] = {}
        self._memory: dict[int, object] = {}
        self.warp_size = 64 if arch.startswith("gfx9") else 32

    def _kernel(self, name: str):
        if name not in self._kernels:
            units = [unit for unit in self._sources if name.startswith(unit)]
            if not units:
                raise KernelFault(f"no unit for kernel {name}")
            unit = max(units, key=len)
            if unit not in self._objects:
                self._objects[unit] = self._emulator.CodeObject(
                    str(compile_source(self._sources[unit], self._arch))
                )
            try:
                self._kernels[name] = self._objects[unit].kernel(name)
            except KeyError as error:
                raise KernelFault(f"no kernel {name}: {error}") from None
        return self._kernels[name]

    def launch(self, kernel: str, grid, block, arguments, shared: int = 0, order: int = 0) -> None:
        """Runs a kernel; see Device.launch.

        Raises:
            KernelFault: an access outside every buffer, LDS or scratch, or an instruction that is not known.
            TypeError: the arguments do not fit the kernel's parameters.
        """
        code = self._kernel(kernel)
        if len(arguments) != len(code.explicit):
            raise TypeError(f"{kernel} takes {len(code.explicit)} arguments, {len(arguments)} given")
        values = []
        for argument, parameter in zip(arguments, code.explicit, strict=False):
            value = pack(argument, parameter[".size"])
            values.append(
                int.from_bytes(value, "little") if parameter[".value_kind"] == "global_buffer" else value
            )
        try:
            code.launch(grid, block, values, dynamic_lds=shared, **_WAVE_ORDERS[order])
        except self._emulator.EmuError as error:
            raise KernelFault(str(error)) from None

    def allocate(self, nbytes: int, offset: int) -> int:
        array = self._emulator.DeviceArray(np.zeros(nbytes + offset, np.uint8))
        self._memory[array.ptr + offset] = array, offset
        return array.ptr + offset

    def free(self, address: int) -> None:
        del self._memory[address]

    def write(self, address: int, data: bytes) -> None:
        array, offset = self._memory[address]
        array.mem.write(data, offset)

    def read(self, address: int, nbytes: int) -> bytes:
        array, offset = self._memory[address]
        return array.mem.read(nbytes, offset)
