"""What this installation holds: the host library, bindings, kernel packs, device sources. Opens nothing with dlopen.

Files do not change while a process runs; what is found out is kept, by the path of the file, as APEX_TREE can name
another folder.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path

from apex._loader import elf, layout, op_model, pack_files, pe, registry, release, system
from apex._loader.machine import Binding, Machine, Pack

LIBRARY = system.host_library()


def on(machine: Machine) -> Machine:
    """The machine with what this installation holds."""
    return dataclasses.replace(
        on_for_bindings(machine),
        cpu_units=cpu_units(),
        packs=packs(),
        vendor=layout.build_facts().get("accelerator", ""),
        sources=registry.units() if layout.device_sources() else (),
    )


def on_for_bindings(machine: Machine) -> Machine:
    """The machine with what the choice of a binding depends on (fit.py), which is less to read."""
    return dataclasses.replace(
        machine,
        library=library_fault(),
        portable=portable_fault(),
        bindings=bindings(),
        stale=staleness(),
    )


# ---- the host library --------------------------------------------------------------------------------------


def library() -> Path:
    """Where the host library should be."""
    return layout.libraries() / LIBRARY


def library_fault() -> str | None:
    """Why the host library cannot be used on this machine, or None."""
    return _library_fault(library())


def portable_fault() -> str | None:
    """Why the portable binding cannot serve, or None."""
    if reason := library_fault():
        return f"the host library cannot be used: {reason}"
    if "apex_interface" not in _exported(library()):
        return "the host library is older than the portable binding: it does not describe its interface"
    return None


def cpu_units() -> tuple[str, ...]:
    """Units that the host library has a CPU variant of, by its exported names: apex_<unit>, apex_<unit>_forward."""
    if library_fault():
        return ()
    exported = _exported(library())
    return tuple(unit for unit in registry.units() if exported & {f"apex_{unit}", f"apex_{unit}_forward"})


def _is_windows(path: Path) -> bool:
    return path.suffix == ".dll"


@functools.cache
def _library_fault(path: Path) -> str | None:
    if fault := (pe if _is_windows(path) else elf).library_fault(path):
        return fault
    try:
        _exported(path)
    except (OSError, ValueError) as error:
        return f"{path.name} is damaged: {error}"
    return None


@functools.cache
def _exported(path: Path) -> frozenset[str]:
    if _is_windows(path):
        return frozenset(pe.Pe(layout.read_bytes(path)).exports())
    symbols = elf.Elf(layout.read_bytes(path)).symbols(dynamic=True)
    return frozenset(symbol.name for symbol in symbols if symbol.defined)


# ---- bindings ----------------------------------------------------------------------------------------------


def bindings() -> tuple[Binding, ...]:
    """The bindings that bindings.json lists; empty if the file is not there."""
    try:
        return _bindings()
    except (TypeError, AttributeError):  # `damage` says so
        return ()


def _bindings() -> tuple[Binding, ...]:
    rows = layout.read_json(_bindings_file(), list) or []
    names = Binding.__dataclass_fields__
    return tuple(Binding(**{key: value for key, value in row.items() if key in names}) for row in rows)


def _bindings_file() -> Path:
    return layout.libraries() / "bindings.json"


def staleness() -> str | None:
    """Why the bindings, which were compiled from other schemas than those that are here, must not be loaded; or None.

    torch does not notice: a call with other arguments than the compiled ones ends the process.
    """
    path, now = layout.built_schemas(), registry.schemas()
    try:
        compiled = op_model.parse(layout.read_bytes(path).decode("utf-8")) if path else {}
    except ValueError as error:  # its words are not those of today
        return f"the build in {layout.built()} is of another csrc/ops.schemas: {error}"
    changed = [name for name in compiled if name not in now or now[name].text != compiled[name].text]
    if not changed:
        return None
    return f"the build in {layout.built()} is older than csrc/ops.schemas: {', '.join(changed)} changed"


# ---- data files --------------------------------------------------------------------------------------------


def damage() -> tuple[str, ...]:
    """Data files that are there and cannot be read, each with why. Without them apex goes on, with less to say."""
    _, extensions = layout.registry_files()
    kinds = {_bindings_file(): list, layout.built() / "build.json": dict, layout.built() / release.FILE: dict}
    if extensions:
        kinds[extensions] = list
    found = {path: "it is no whole JSON" for path, kind in kinds.items() if not _readable(path, kind)}
    checks = ((_bindings_file(), _bindings), (layout.built() / release.FILE, release.load))
    for path, check in checks:
        try:
            check()
        except (TypeError, AttributeError, ValueError) as error:
            found.setdefault(path, str(error))
    if extensions and not registry.extensions():
        found.setdefault(extensions, "it names no extension")
    return tuple(f"{path.name}: {why}" for path, why in found.items())


def _readable(path: Path, kind: type) -> bool:
    return not os.path.lexists(path) or layout.read_json(path, kind) is not None


# ---- kernel packs ------------------------------------------------------------------------------------------


def packs() -> tuple[Pack, ...]:
    """All kernel packs, sorted by arch; empty if there are none."""
    folder = layout.packs()
    try:
        found = sorted(folder.iterdir())
    except OSError:
        return ()
    return tuple(pack_files.read(entry) for entry in found if os.path.isdir(entry))
