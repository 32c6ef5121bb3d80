"""Whether a wheel is what this checkout and the pinned compilers make: built again from nothing, compared byte for
byte."""

from __future__ import annotations

import base64
import contextlib
import csv
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from build_matrix.errors import BuildError, GateError, PinError
from build_matrix.parts import packs
from build_matrix.spec import identity, matrix, registry
from build_matrix.store import Result, Store, digest, files
from build_matrix.store.engine import Engine
from build_matrix.toolchains import by_arch, host_compiler, pythons
from build_matrix.wheels import provenance
from build_matrix.wheels.wheel_file import WheelFile, difference


@contextlib.contextmanager
def nothing_made() -> Iterator[Store]:
    """A store in which nothing is, for one run: what was made before is not believed, and what wheels share is made
    once."""
    with files.temporary("verify") as folder:
        yield Store(folder)


def run(
    path: Path,
    store: Store,
    arch: str | None = None,
    jobs: int | None = None,
    tell: Callable = lambda done: None,
) -> list[str]:
    """What was verified, a line each. With `arch`, the code objects of that pack alone. `store` is of `nothing_made`.

    Raises BuildError where the wheel is of another source, PinError (not verifiable) where a compiler is another than
    made it, ToolchainMissing or PythonMissing where there is none at all, GateError where something differs.
    """
    wheel = WheelFile(path)
    wheel.check_facts()
    said = [_record(wheel), _statement(wheel)]
    if arch:
        return [*said, pack(wheel, arch, Engine(store, jobs, tell))]
    return [*said, whole(wheel, store, jobs, tell)]


def _record(wheel: WheelFile) -> str:
    """Every file is what RECORD says."""
    name = wheel.only(".dist-info/RECORD")
    lines = csv.reader(io.StringIO(wheel.data(name).decode(errors="replace")))
    rows = {row[0]: row[1] if len(row) > 1 else "" for row in lines if row}
    faults = [f"RECORD does not list {file}" for file in wheel.members if file not in rows]
    for file, recorded in rows.items():
        if file not in wheel.members:
            faults.append(f"RECORD lists {file}, which is not there")
        elif file != name:
            have = base64.urlsafe_b64encode(bytes.fromhex(wheel.members[file].sha256)).rstrip(b"=").decode()
            if recorded != f"sha256={have}":
                faults.append(f"{file} is not what RECORD says")
    if faults:
        raise GateError(wheel.path.name, faults)
    return f"RECORD: {len(rows)} files are as listed"


def _statement(wheel: WheelFile) -> str:
    there = provenance.check(wheel.path)
    return "statement: of this very file" if there else f"statement: none lies beside ({provenance.SUFFIX})"


def _check_source(wheel: WheelFile) -> None:
    stated, have = wheel.facts["source_sha256"], identity.compiled()
    if stated != have:
        raise BuildError(
            f"{wheel.path.name} was made of source {stated[:12]}, this checkout is {have[:12]}: check out its commit"
        )


def _check_compiler(stated: dict, have: dict) -> None:
    if stated != have:
        pinned, here = (f"{c['version']} (sha256 {c['sha256'][:12]})" for c in (stated, have))
        raise PinError(stated["name"], pinned, here, verifiable=False)


def pack(wheel: WheelFile, arch: str, engine: Engine, only: Sequence[str] | None = None) -> str:
    """Compiles the code objects of one pack again (`only` those units) and compares their digests."""
    _check_source(wheel)
    if arch not in wheel.packs:
        raise BuildError(
            f"{wheel.path.name} has no pack for {arch}; it has {', '.join(wheel.packs) or 'none'}"
        )
    manifest, toolchain = wheel.packs[arch], by_arch.toolchain_for(arch)
    _check_compiler(manifest["compiler"], toolchain.describe())
    units = {name: entry for name, entry in manifest["units"].items() if only is None or name in only}
    wanted = [path.stem for path in registry.device_units()] if only is None else only
    faults = [
        f"{arch}/{name}: this checkout makes it, and the wheel has none"
        for name in wanted
        if name not in units
    ]
    made = engine.run(packs.units(arch, toolchain, list(units)))
    known = {result.name.partition("/")[2] for result in made}
    faults += [
        f"{arch}/{name}: the wheel has it, and this checkout makes none"
        for name in units
        if name not in known
    ]
    for result in made:
        name = result.name.partition("/")[2]
        (path,) = [p for p in result.folder.iterdir() if p.name == units[name]["file"].removesuffix(".xz")]
        shipped = digest.of_bytes(wheel.code(arch, name))
        if digest.of_file(path) != shipped or shipped != units[name]["sha256"]:
            faults.append(f"{arch}/{name}: built again it is {digest.of_file(path)}, in the wheel {shipped}")
    if faults:
        raise GateError(wheel.path.name, faults)
    return f"{arch}: {len(units)} code objects are the same, byte for byte"


def whole(wheel: WheelFile, store: Store, jobs: int | None, tell: Callable[[Result], None]) -> str:
    """Builds the wheel again and compares the files."""
    from build_matrix.farm import cluster, plan

    _check_source(wheel)
    facts = wheel.facts
    pure = matrix.load().accelerator(facts["accelerator"]).pure
    if not pure:
        _check_compiler(facts["host_compiler"], host_compiler.find(wheel.platform).describe())
    for arch, manifest in wheel.packs.items():
        _check_compiler(manifest["compiler"], by_arch.toolchain_for(arch).describe())
    for tag in facts["python"]:
        pythons.find(tag)  # a plan leaves out an optional one that is not here, and the wheel with it
    chosen = plan.Selection(
        (facts["accelerator"],),
        tuple(facts["archs"]),
        tuple(torch["release"] for torch in facts["torch"]),
        tuple(facts["python"]),
        platforms=() if pure else (wheel.platform,),
    )
    with cluster.local(jobs) as client:
        done = cluster.run(plan.make(chosen), client, store, tell)
    (made,) = [step for step in done if step.kind == "wheel"]
    (again,) = store.output("wheel", made.key).glob("*.whl")
    if again.name == wheel.path.name and again.read_bytes() == wheel.path.read_bytes():
        return f"{again.name}: the same, byte for byte"
    faults = _words(difference(wheel, WheelFile(again)))
    if again.name != wheel.path.name:
        faults.append(f"built again it is called {again.name}")
    raise GateError(wheel.path.name, faults or ["the archives differ in form"])


def _words(found: dict) -> list[str]:
    """What is in the wheel and what was built again, where they differ."""
    facts = [f"{name}: {old} in the wheel, {new} built again" for name, (old, new) in found["facts"].items()]
    names = {"added": "not in the wheel", "removed": "not built again", "changed": "differs"}
    return facts + [f"{name} {names[what]}" for what, files in found["files"].items() for name in files]
