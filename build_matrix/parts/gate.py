"""What a code object must be before it may go into a pack."""

from __future__ import annotations

from apex._loader.elf import Elf
from build_matrix.errors import GateError
from build_matrix.parts.inspect_code import Inspected
from build_matrix.spec.archs import AMD_MACHINES, Arch
from build_matrix.spec.matrix import Matrix

REGISTER_FILE = 65536  # 32-bit registers of an NVIDIA SM that one block can have, sm_70 to sm_121
BESIDE_SPILLS = 16  # bytes of a stack on an AMD card that spilling takes itself


def faults(unit: str, image: bytes, code: Inspected, arch: Arch, matrix: Matrix) -> list[str]:
    """Everything that is wrong with the code object of `unit` for `arch`; empty when it passes."""
    found = []
    if code.arch != arch.name:
        found.append(f"the object says it is for {code.arch}, not {arch.name}")
    if arch.vendor == "rocm":
        machine = Elf(image).flags & 0xFF
        if machine != AMD_MACHINES[arch.name]:
            found.append(f"e_flags name machine 0x{machine:02x}, not 0x{AMD_MACHINES[arch.name]:02x}")
    if not code.kernels:
        found.append("it holds no kernel")
    for name, kernel in code.kernels.items():
        if not name.startswith(unit):
            found.append(f"kernel {name} does not begin with the name of its unit")
        if kernel.wave_size != arch.wave_size:
            found.append(f"{name}: wave size {kernel.wave_size}, not {arch.wave_size}")
        if arch.vendor == "rocm" and kernel.stack_bytes > kernel.spill_bytes + BESIDE_SPILLS:
            found.append(
                f"{name}: {kernel.stack_bytes} bytes of a thread lie in memory, {kernel.spill_bytes} of them "
                "spilled: an array whose index the compiler does not know, or a function that it calls"
            )
        if arch.kind == "cubin" and not kernel.registers:
            found.append(f"{name}: no register count")
        if arch.kind == "cubin" and kernel.registers * kernel.max_threads > REGISTER_FILE:
            found.append(
                f"{name}: {kernel.registers} registers x {kernel.max_threads} threads cannot be launched"
            )
    return found


def spills(unit: str, code: Inspected, arch: Arch, matrix: Matrix) -> list[str]:
    """Every kernel of `unit` that spills more than is accepted."""
    accepted = matrix.accepted_spills(unit, arch.name)
    return [
        f"{name}: spills {kernel.spill_bytes} bytes (accepted: {accepted.get(name, 0)})"
        for name, kernel in code.kernels.items()
        if kernel.spill_bytes > accepted.get(name, 0)
    ]


def oversize(unit: str, size: int, arch: str, matrix: Matrix) -> list[str]:
    """A line where the code of `unit` for `arch`, `size` bytes, is over its budget."""
    allowed = matrix.unit_budget(unit, arch)
    if size <= allowed:
        return []
    return [f"{unit} for {arch}: {size} bytes are over its budget of {allowed} (matrix.toml)"]


def check(
    unit: str,
    image: bytes,
    code: Inspected,
    arch: Arch,
    matrix: Matrix,
    by: str = "",
    lenient: bool = False,
) -> list[str]:
    """Raises GateError naming every fault, and what it was compiled `by`. With `lenient` size is none, nor are spills:
    those are given back, in words."""
    of = f"{unit} for {arch.name}" + (f" by {by}" if by else "")
    found, spilled = faults(unit, image, code, arch, matrix), spills(unit, code, arch, matrix)
    if not lenient:
        found += spilled + oversize(unit, len(image), arch.name, matrix)
    if found:
        raise GateError(of, found)
    return [f"{of}: {words}" for words in spilled]


def check_same_kernels(packs: dict[str, dict[str, set[str]]], matrix: Matrix) -> None:
    """`packs`: arch -> unit -> kernel names. Raises GateError where two archs of one build differ in
    kernels, beyond those of one vendor."""
    union: dict[str, set[str]] = {}
    for units in packs.values():
        for unit, kernels in units.items():
            union.setdefault(unit, set()).update(kernels)
    found = []
    for arch, units in packs.items():
        for unit, kernels in union.items():
            absent = sorted(k for k in kernels - units.get(unit, set()) if matrix.wants_kernel(k, arch))
            if absent:
                found.append(f"{arch}: {unit} lacks {', '.join(absent)}")
    if found:
        raise GateError("the set of packs", found)
