"""Fills a folder with every built part of `apex/` (all but Python sources): what the loader finds in a
checkout under build/tree, and what a wheel holds."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from build_matrix import REPOSITORY
from build_matrix.errors import BuildError
from build_matrix.parts import bindings, gate, host_library, ledger, packs, releases
from build_matrix.spec import identity
from build_matrix.spec import matrix as matrix_file
from build_matrix.spec.registry import Registry, device_units
from build_matrix.store import Store, WorkUnit, digest, files
from build_matrix.store.engine import Engine
from build_matrix.toolchains import Toolchain, by_arch, headers, host_compiler, inputs
from build_matrix.toolchains.pythons import Python

CSRC = REPOSITORY / "csrc"
DEFAULT = REPOSITORY / "build/tree"
OWN = {
    *("build.json", "coverage.json", "extensions.json", releases.FILE, "ops.schemas"),
    "device",
    "lib",
    "packs",
}
SCRATCH = re.compile(r"\.apex-\d+(-old)?")  # of a process that fills a tree


@dataclass(frozen=True)
class Request:
    """What goes into a tree: packs of `archs`, bindings of every (torch, python), for the accelerator
    `name`."""

    accelerator: str = "cpu"
    archs: tuple[str, ...] = ()
    torch: tuple[str, ...] = ()
    pythons: tuple[Python, ...] = ()
    local: str | None = None  #: local version label; None for the accelerator's
    version: str = ""  #: empty for version.txt
    distribution: str = ""  #: empty for apex-<accelerator>
    units: tuple[str, ...] | None = None  #: device units of the packs; None for all
    toolchains: Mapping[str, Toolchain] | None = None  #: by arch; None for those of the matrix
    published: bool = False  #: torch's headers come from the index even where that torch is installed
    lenient: bool = False  #: spills are told, and stop nothing
    platform: str = matrix_file.NATIVE  #: what the host library and the bindings are compiled for


def label(request: Request) -> str:
    """The local version label: what was asked for, else the accelerator's in the matrix."""
    return (
        request.local
        if request.local is not None
        else matrix_file.load().accelerator(request.accelerator).label
    )


def fill(request: Request, target: Path, engine: Engine) -> dict[str, object]:
    """Builds what is missing and lays everything under `target`/apex anew. Returns what build.json holds. Raises
    BuildError, before anything is built, where `target`/apex is there and no tree that this wrote."""
    check_target(target)
    toolchains = {
        arch: (request.toolchains or {}).get(arch) or by_arch.toolchain_for(arch) for arch in request.archs
    }
    torches = [_headers(request, torch, engine.store) for torch in request.torch]
    units = _Units(request, toolchains, torches)
    results = {result.unit.key: result for result in engine.run(units.all())}
    library = engine.one(host_library.build(engine.store, engine.run, request.platform))

    target.mkdir(parents=True, exist_ok=True)
    with files.lock(target / ".lock"):  # two that fill one tree do so one after the other
        for left in target.glob(".apex-*"):
            if SCRATCH.fullmatch(left.name):  # of those that were killed
                shutil.rmtree(left, ignore_errors=True)
        root = target / f".apex-{os.getpid()}"
        host_library.place(library.folder, root / "lib")
        manifests = _lay_packs(toolchains, units, results, root / "packs")
        entries = _lay_bindings(torches, request.pythons, units, results, root / "lib")
        read = _inputs(toolchains, request.pythons, units, results, library.folder)
        facts = _facts(request, toolchains, torches, entries, read)
        _lay_data(root, facts, entries, manifests)
        check_target(target)
        _swap(root, target / "apex")
    return facts


def check_target(target: Path) -> None:
    """Raises BuildError where `target`/apex is neither nothing, an empty folder nor a tree: it would be replaced."""
    place = target / "apex"
    if not os.path.lexists(place):
        return
    if place.is_symlink() or not place.is_dir():
        why = "is no folder"
    else:
        names = {path.name for path in place.iterdir()}
        if not names or ("build.json" in names and names <= OWN):
            return
        why = f"holds {min(names - OWN)!r}" if names - OWN else "has no build.json"
    raise BuildError(
        f"{place} {why}, and a tree would take its place: name a new folder, or one that `tree` filled, with "
        "--target; nothing was changed"
    )


def _headers(request: Request, torch: str, store: Store) -> headers.TorchHeaders:
    if request.published or request.platform != matrix_file.NATIVE:
        return headers.published(torch, store, request.platform)
    return headers.obtain(torch, store)


def fill_python_only(request: Request, target: Path) -> dict[str, object]:
    """The data files alone, where nothing is compiled: the reference needs schemas and registry. Returns what
    build.json holds."""
    (target / "apex/lib").mkdir(parents=True, exist_ok=True)
    facts = _facts(request, {}, [], [], {})
    _lay_data(target / "apex", facts, [], {})
    return facts


def _swap(new: Path, place: Path) -> None:
    """Puts a finished tree in its place; a process that has the old libraries mapped keeps them."""
    old = place.with_name(f"{new.name}-old")
    if place.exists():
        place.rename(old)
    new.rename(place)
    shutil.rmtree(old, ignore_errors=True)


class _Units:
    """The work units of a request, each made once: for that all its sources are read. By release of torch, by that and
    Python, and by arch."""

    def __init__(
        self, request: Request, toolchains: Mapping[str, Toolchain], torches: list[headers.TorchHeaders]
    ):
        self.modules = {
            (torch.release, python): bindings.python_module(torch, python)
            for torch in torches
            for python in request.pythons
        }
        self.libraries = {torch.release: bindings.torch_library(torch) for torch in torches}
        self.code = {
            arch: packs.units(arch, toolchain, request.units, request.lenient)
            for arch, toolchain in toolchains.items()
        }

    def all(self) -> list[WorkUnit]:
        """Long ones first, so that the last thread to finish is not alone with a long one."""
        code = [unit for units in self.code.values() for unit in units]
        return [*self.modules.values(), *self.libraries.values(), *code]


def _lay_packs(
    toolchains: Mapping[str, Toolchain], units: _Units, results: dict, target: Path
) -> dict[str, dict]:
    manifests = {}
    for arch, toolchain in toolchains.items():
        chosen = [results[unit.key] for unit in units.code[arch]]
        manifests[arch] = packs.assemble(arch, toolchain, chosen, target / arch)
    kernels = {arch: packs.kernels(manifest) for arch, manifest in manifests.items()}
    gate.check_same_kernels(kernels, matrix_file.load())
    return manifests


def _lay_bindings(
    torches: list[headers.TorchHeaders],
    pythons: tuple[Python, ...],
    units: _Units,
    results: dict,
    library: Path,
) -> list[dict]:
    entries = []
    for torch in torches:
        chosen = [results[units.libraries[torch.release].key]]
        chosen += [results[units.modules[torch.release, python].key] for python in pythons]
        folder = bindings.place(chosen, torch.minor, library)
        bindings.check_symbols(library / "libapex.so", sorted(folder.glob("*.so")))
        entries += [bindings.entry(torch, python) for python in pythons]
    return entries


def _inputs(
    toolchains: Mapping[str, Toolchain],
    pythons: tuple[Python, ...],
    units: _Units,
    results: dict,
    library: Path,
) -> dict[str, object]:
    """The digests of what was compiled with: the headers of each torch, each Python (with its version) and each device
    compiler that has any, and of the system."""

    def read(unit: WorkUnit) -> dict[str, list[str]]:
        return inputs.read(results[unit.key].folder)

    of_torch = {release: [read(unit)] for release, unit in units.libraries.items()}
    of_python: dict[Python, list] = {python: [] for python in pythons if units.libraries}
    for (release, python), unit in units.modules.items():
        of_python[python].append(read(unit))
        of_torch[release].append(of_python[python][-1])
    of_compiler: dict[str, list] = {}
    for arch, toolchain in toolchains.items():
        if toolchain.headers:
            name = f"{toolchain.name} {toolchain.version}"
            of_compiler.setdefault(name, []).extend(read(unit) for unit in units.code[arch])
    of_both = [*of_torch.values(), *of_compiler.values()]
    everything = [inputs.read(library), *(each for units in of_both for each in units)]
    return {
        "torch": {name: inputs.of_part(units, "torch") for name, units in of_torch.items()},
        "python": {
            python.tag: {"version": python.version, "sha256": inputs.of_part(modules, "python")}
            for python, modules in of_python.items()
        },
        inputs.TOOLKIT: {name: inputs.of_part(units, inputs.TOOLKIT) for name, units in of_compiler.items()},
        inputs.SYSTEM: inputs.of_part(everything, inputs.SYSTEM),
    }


def _facts(
    request: Request,
    toolchains: Mapping[str, Toolchain],
    torches: list[headers.TorchHeaders],
    entries: list[dict],
    read: dict,
) -> dict[str, object]:
    compilers = {json.dumps(toolchain.describe(), sort_keys=True) for toolchain in toolchains.values()}
    return {
        "format": 1,
        "version": request.version or identity.version(),
        "local": label(request),
        "distribution": request.distribution
        or matrix_file.load().accelerator(request.accelerator).distribution,
        "accelerator": request.accelerator,
        "archs": list(request.archs),
        "toolchains": [json.loads(compiler) for compiler in sorted(compilers)],
        "host_compiler": host_compiler.find(request.platform).describe() if read else None,
        "torch": [
            {
                "release": torch.release,
                "git_version": torch.git_version,
                "headers_sha256": read["torch"][torch.release],
            }
            for torch in torches
        ],
        "headers": {name: read[name] for name in ("python", inputs.TOOLKIT, inputs.SYSTEM) if name in read},
        "python": sorted({entry["python"] for entry in entries}),
        "source_sha256": identity.compiled(),
    }


def _lay_data(root: Path, facts: dict, entries: list[dict], manifests: dict[str, dict]) -> None:
    (root / "device").mkdir(parents=True)
    for path in sorted((CSRC / "device").glob("*")):
        if path.suffix in (".cu", ".h"):
            shutil.copyfile(path, root / "device" / path.name)
    shutil.copyfile(CSRC / "ops.schemas", root / "ops.schemas")
    archs = matrix_file.load().archs(facts["accelerator"])
    sources = {path.stem: digest.of_source(path) for path in device_units()}
    coverage = ledger.ledger(facts["version"], manifests, archs, sources)
    for name, value in {
        "lib/bindings.json": entries,
        "extensions.json": Registry.load().as_json(),
        "coverage.json": coverage,
        "build.json": facts,
        releases.FILE: releases.table() | {"grades": releases.grades()},
    }.items():
        (root / name).write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
