"""Reads kernels and their resources out of a code object, without any tool of the vendor."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from apex._loader.elf import EM_AMDGPU, EM_CUDA, STB_GLOBAL, STT_FUNC, Elf
from build_matrix.parts import msgpack

AMD_METADATA = 32
KERNEL_ENTRY = 0x10  # STO_CUDA_ENTRY in st_other: a kernel, not a device function
REGISTERS, STACK, MAX_THREADS = 0x2F, 0x12, 0x05  # attributes of .nv.info
PTX_ENTRY = re.compile(r"\.visible\s+\.entry\s+(\w+)")
PTX_TARGET = re.compile(r"^\.target\s+(\S+?)(?:,.*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Kernel:
    """What one kernel takes of the machine. Numbers that a format does not hold are 0."""

    registers: int = 0
    spill_bytes: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    wave_size: int = 32
    max_threads: int = 0

    def as_json(self) -> dict[str, int]:
        """As the manifest of a pack holds it."""
        return dict(self.__dict__)


@dataclass(frozen=True)
class Inspected:
    """`arch` as the object itself says it: sm_90, compute_80 or gfx942."""

    arch: str
    kernels: dict[str, Kernel]


def inspect(image: bytes, kind: str, spills: dict[str, int] | None = None) -> Inspected:
    """`kind` is cubin, ptx or hsaco; `spills` what the compiler reported. Raises ValueError on another
    format."""
    if kind == "ptx":
        return _ptx(image.decode())
    elf = Elf(image)
    if kind == "cubin" and elf.machine == EM_CUDA:
        return _cubin(elf, spills or {})
    if kind == "hsaco" and elf.machine == EM_AMDGPU:
        return _hsaco(elf)
    raise ValueError(f"ELF machine {elf.machine} is not what a {kind} has")


def _ptx(text: str) -> Inspected:
    target = PTX_TARGET.search(text)
    kernels = {name: Kernel() for name in PTX_ENTRY.findall(text)}
    return Inspected(f"compute_{target[1].removeprefix('sm_')}" if target else "none", kernels)


def _cubin(elf: Elf, spills: dict[str, int]) -> Inspected:
    # CUDA 13 (ELF ABI 8) moved the arch from the lowest byte of e_flags to the next one.
    number = elf.flags >> 8 & 0xFF if elf.abi_version >= 8 else elf.flags & 0xFF
    symbols = elf.symbols()
    attributes = {"": _attributes(elf.section(".nv.info"))}
    kernels = {}
    for index, symbol in enumerate(symbols):
        if symbol.kind != STT_FUNC or symbol.bind != STB_GLOBAL or not symbol.other & KERNEL_ENTRY:
            continue
        own = _attributes(elf.section(f".nv.info.{symbol.name}"))
        threads = own.get(MAX_THREADS, [(0, 0, 0)])[0]
        kernels[symbol.name] = Kernel(
            registers=_of_symbol(attributes[""], REGISTERS, index),
            stack_bytes=_of_symbol(attributes[""], STACK, index),
            spill_bytes=spills.get(symbol.name, 0),
            shared_bytes=_shared(elf, symbol.name),
            wave_size=32,
            max_threads=threads[0] * max(threads[1], 1) * max(threads[2], 1),
        )
    return Inspected(f"sm_{number}", kernels)


def _shared(elf: Elf, kernel: str) -> int:
    return next((section.size for section in elf.sections if section.name == f".nv.shared.{kernel}"), 0)


def _attributes(data: bytes) -> dict[int, list[tuple[int, ...]]]:
    """.nv.info: format (1 byte), attribute (1 byte), then 2 bytes of value, or of size where the format is
    4."""
    found: dict[int, list[tuple[int, ...]]] = {}
    at = 0
    while at + 4 <= len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == 4:
            words = struct.unpack_from(f"<{value // 4}I", data, at)
            found.setdefault(attribute, []).append(words)
            at += value
    return found


def _of_symbol(attributes: dict[int, list[tuple[int, ...]]], attribute: int, index: int) -> int:
    return next((words[1] for words in attributes.get(attribute, []) if words[0] == index), 0)


def _hsaco(elf: Elf) -> Inspected:
    note = elf.note("AMDGPU", AMD_METADATA)
    if note is None:
        raise ValueError("no AMDGPU metadata note")
    metadata = msgpack.decode(note)
    kernels = {
        kernel[".name"]: Kernel(
            registers=kernel[".vgpr_count"],
            spill_bytes=4 * kernel[".vgpr_spill_count"],
            stack_bytes=kernel[".private_segment_fixed_size"],
            shared_bytes=kernel[".group_segment_fixed_size"],
            wave_size=kernel[".wavefront_size"],
            max_threads=kernel[".max_flat_workgroup_size"],
        )
        for kernel in metadata["amdhsa.kernels"]
    }
    return Inspected(metadata["amdhsa.target"].partition("--")[2].partition(":")[0], kernels)
