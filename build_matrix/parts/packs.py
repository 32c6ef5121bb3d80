"""Kernel packs: the code objects of one arch with a manifest. Work units are (source, arch)."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from build_matrix.parts import gate
from build_matrix.parts.inspect_code import inspect
from build_matrix.spec import matrix as matrix_file
from build_matrix.spec import registry
from build_matrix.spec.archs import Arch
from build_matrix.store import Result, WorkUnit, digest
from build_matrix.toolchains import Toolchain, inputs

FORMAT = 1


def units(
    arch_name: str, toolchain: Toolchain, only: Sequence[str] | None = None, lenient: bool = False
) -> list[WorkUnit]:
    """One work unit per device source; with `only`, those of the named units. `lenient`: spills that are not accepted
    are told, as in a source install, whose compiler is whichever is here."""
    arch = Arch(arch_name)
    sources = [path for path in registry.device_units() if only is None or path.stem in only]
    return [_unit(source, arch, toolchain, lenient) for source in sources]


def _unit(source: Path, arch: Arch, toolchain: Toolchain, lenient: bool) -> WorkUnit:
    matrix = matrix_file.load()
    source_digest = digest.of_source(source)

    def make(output: Path) -> None:
        compiled = toolchain.compile(source, arch)
        code = inspect(compiled.image, arch.kind, compiled.spills)
        by = f"{toolchain.name} {toolchain.version}"
        for told in gate.check(source.stem, compiled.image, code, arch, matrix, by, lenient):
            print(f"apex: {told}; it runs, and is slower", file=sys.stderr)
        file = f"{source.stem}{arch.suffix}"
        (output / file).write_bytes(compiled.image)
        entry = {
            "file": file,
            "sha256": digest.of_bytes(compiled.image),
            "bytes": len(compiled.image),
            "source_sha256": source_digest,
            "kernels": {name: kernel.as_json() for name, kernel in sorted(code.kernels.items())},
        }
        (output / "entry.json").write_text(json.dumps(entry, indent=1))
        own = {inputs.TOOLKIT: [toolchain.headers]} if toolchain.headers else {}
        inputs.write(output, inputs.sort(compiled.read, own, [source.parent]))

    of = {
        "source": source_digest,
        "compiler": toolchain.describe(),
        "flags": toolchain.flags(arch),
        "format": FORMAT,
        "accepted_spills": matrix.accepted_spills(source.stem, arch.name),
        "beside": inputs.FILE,
        **({"spills": "told"} if lenient else {}),  # no release takes such a one out of the store
    }
    return WorkUnit("code", f"{arch.name}/{source.stem}", of, make)


def assemble(arch_name: str, toolchain: Toolchain, results: list[Result], target: Path) -> dict:
    """Lays the code objects of one arch into `target` with manifest.json. Returns the manifest."""
    arch = Arch(arch_name)
    target.mkdir(parents=True, exist_ok=True)
    manifest = {
        "format": FORMAT,
        "arch": arch.name,
        "vendor": arch.vendor,
        "kind": arch.kind,
        "compiler": toolchain.describe(),
        "flags": toolchain.flags(arch),
        "units": {},
    }
    for result in sorted(results, key=lambda result: result.unit.name):
        entry = json.loads((result.folder / "entry.json").read_text())
        shutil.copyfile(result.folder / entry["file"], target / entry["file"])
        manifest["units"][result.unit.name.partition("/")[2]] = entry
    (target / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    return manifest


def kernels(manifest: dict) -> dict[str, set[str]]:
    """unit -> kernel names of a manifest."""
    return {unit: set(entry["kernels"]) for unit, entry in manifest["units"].items()}
