"""The coverage ledger: for each unit and kernel, on each arch, what will run. Shipped as apex/coverage.json,
and the one source of the doctor's screen, the support tables, the size budget and `compat`."""

from __future__ import annotations

from build_matrix.parts import gate
from build_matrix.spec.archs import Arch
from build_matrix.spec.matrix import Matrix

NATIVE, JIT, REFERENCE = "native", "jit", "reference"


def of_kernel(unit: str, kernel: str) -> str:
    """The element types of a kernel as its name says them: `f32_f32` of multi_tensor_adam_f32_f32; `` for
    none."""
    return kernel.removeprefix(unit).lstrip("_")


def ledger(version: str, manifests: dict[str, dict], archs: list[str], sources: dict[str, str]) -> dict:
    """`manifests`: arch -> manifest of the packs of one wheel; `archs`: every arch that the ledger speaks
    about; `sources`: unit -> digest of its device source. A kernel that no pack names is in no row, so
    `archs` without a pack take the kernels of the others. Returns what coverage.json holds."""
    kernels: dict[str, set[str]] = {unit: set() for unit in sources}
    for manifest in manifests.values():
        for unit, entry in manifest["units"].items():
            kernels.setdefault(unit, set()).update(entry["kernels"])
    units = {}
    for unit, names in sorted(kernels.items()):
        rows = {
            name: {
                "types": of_kernel(unit, name),
                "archs": {a: _cell(manifests.get(a), unit, name, a) for a in archs},
            }
            for name in sorted(names)
        }
        sizes = {arch: m["units"][unit]["bytes"] for arch, m in manifests.items() if unit in m["units"]}
        units[unit] = {"source_sha256": sources.get(unit, ""), "bytes": sizes, "kernels": rows}
    return {"format": 1, "version": version, "archs": archs, "units": units}


def _cell(manifest: dict | None, unit: str, kernel: str, arch: str) -> dict:
    entry = (manifest or {"units": {}})["units"].get(unit, {})
    resources = entry.get("kernels", {}).get(kernel)
    if resources is None:
        # Without a pack of its own an arch compiles at run time; a generic arch or PTX is no device and never
        # does.
        device = not Arch(arch).generic and Arch(arch).kind != "ptx"
        return {"state": JIT if device else REFERENCE}
    return {
        "state": NATIVE,
        "sha256": entry["sha256"],
        "registers": resources["registers"],
        "spill_bytes": resources["spill_bytes"],
    }


def native(coverage: dict) -> list[str]:
    """The archs on which every kernel is native code."""
    rows = [row["archs"] for unit in coverage["units"].values() for row in unit["kernels"].values()]
    return [arch for arch in coverage["archs"] if rows and all(row[arch]["state"] == NATIVE for row in rows)]


def over_budget(coverage: dict, matrix: Matrix) -> list[str]:
    """Code objects that are larger than their budget, one line each."""
    return [
        line
        for unit, row in coverage["units"].items()
        for arch, size in row["bytes"].items()
        for line in gate.oversize(unit, size, arch, matrix)
    ]
