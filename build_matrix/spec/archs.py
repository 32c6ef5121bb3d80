"""GPU architectures: which vendor, how the code object says it, and the name of its pack."""

from __future__ import annotations

from dataclasses import dataclass

# EF_AMDGPU_MACH of e_flags, from the AMDGPU back end's manual (LLVM, AMDGPUUsage, "ELF Header e_flags").
AMD_MACHINES = {
    "gfx908": 0x30, "gfx90a": 0x3F, "gfx942": 0x4C, "gfx950": 0x4F, "gfx1030": 0x36, "gfx1100": 0x41,
    "gfx1101": 0x46, "gfx1200": 0x48, "gfx1201": 0x4E, "gfx9-4-generic": 0x5F, "gfx11-generic": 0x54,
    "gfx12-generic": 0x59,
}  # fmt: skip


@dataclass(frozen=True)
class Arch:
    """`sm_90` (machine code), `compute_80` (PTX), `gfx942` or `gfx9-4-generic`."""

    name: str

    @property
    def vendor(self) -> str:
        """rocm or cuda."""
        return "rocm" if self.name.startswith("gfx") else "cuda"

    @property
    def kind(self) -> str:
        """The format of its code objects: cubin, ptx or hsaco."""
        if self.vendor == "rocm":
            return "hsaco"
        return "ptx" if self.name.startswith("compute_") else "cubin"

    @property
    def suffix(self) -> str:
        """What the file of a code object ends in."""
        return {"hsaco": ".co", "ptx": ".ptx", "cubin": ".cubin"}[self.kind]

    @property
    def generic(self) -> bool:
        """Whether it stands for a family of AMD's chips, and is no chip itself."""
        return self.name.endswith("-generic")

    @property
    def code_object(self) -> int:
        """The version of AMD's code objects: generic targets exist from 6 on."""
        return 6 if self.generic else 5

    @property
    def number(self) -> int:
        """90 of sm_90 and compute_90; 0 for AMD."""
        return int(self.name.partition("_")[2]) if self.vendor == "cuda" else 0

    @property
    def wave_size(self) -> int:
        """Lanes a warp: 64 on GCN and CDNA (gfx9), 32 elsewhere."""
        return 64 if self.name.startswith("gfx9") else 32
