"""The floor of every library in a wheel: manylinux_2_28. Reads symbol versions from the ELF file itself."""

from __future__ import annotations

import struct
from pathlib import Path

from apex._loader.elf import Elf
from build_matrix.errors import GateError

FLOOR = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (8, 0, 0)}
SHT_GNU_VERNEED = 0x6FFFFFFE
# A wheel's library may need these and no others: no CUDA, no HIP, no OpenMP, no Python.
MAY_NEED = {
    "libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1", "libgcc_s.so.1", "libstdc++.so.6", "libc10.so", "libtorch_cpu.so",
    "libtorch_python.so", "libapex.so", "libapex_torch.so",
}  # fmt: skip


def needed_versions(elf: Elf) -> list[str]:
    """Symbol versions that the file takes from other libraries: GLIBC_2.14, CXXABI_1.3, ..."""
    found = []
    for section in elf.sections:
        if section.kind != SHT_GNU_VERNEED:
            continue
        strings = elf.sections[section.link].offset
        at = section.offset
        for _ in range(section.info):
            _, count, _, auxiliary, following = struct.unpack_from("<HHIII", elf.data, at)
            entry = at + auxiliary
            for _ in range(count):
                _, _, _, name, skip = struct.unpack_from("<IHHII", elf.data, entry)
                found.append(elf.text(strings + name))
                entry += skip
            at += following
    return sorted(set(found))


def faults(path: Path) -> list[str]:
    """Everything that keeps a library from manylinux_2_28; empty when it fits."""
    elf = Elf.read(path)
    found = []
    for version in needed_versions(elf):
        family, _, number = version.partition("_")
        parts = tuple(int(part) for part in number.split(".") if part.isdigit())
        if family in FLOOR and parts > FLOOR[family]:
            found.append(
                f"needs {version}; {family}_{'.'.join(map(str, FLOOR[family]))} is the newest allowed"
            )
    found += [f"needs {name}" for name in elf.dynamic()[1] if name not in MAY_NEED]
    return found


def check(path: Path) -> None:
    """Raises GateError naming every fault."""
    if found := faults(path):
        raise GateError(path.name, found)
