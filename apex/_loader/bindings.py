"""Loading the binding that fits the torch that runs.

A binding is compiled C++: 3a `libapex_torch.so` for one torch minor, 3b `_C` for one torch minor and one
Python. One built for another minor can load and then run wrongly, so versions are compared before anything is
opened (fit.py).

`load()` ends in one of three states, and `reason` says why:
- exact: 3a is loaded and the dispatcher ops `torch.ops.apex.*` are its own;
- portable: the ops are defined from Python over libapex's C interface (apex/_portable), for a torch that no compiled
  binding fits;
- reference: they are defined from Python and run on the reference.

APEX_BINDING=exact, portable or reference takes that one or raises.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from apex._loader import (
    elf,
    environment,
    installed,
    layout,
    library,
    mapped,
    offers,
    probe,
    reference,
    registry,
    remedies,
    system,
)
from apex._loader.errors import (
    ApexError,
    BindingMismatchError,
    InstallationError,
    SlowPathWarning,
    TwoCopiesError,
)
from apex._loader.fit import Fit, fit
from apex._loader.machine import Machine
from apex._loader.once import Once

NAMESPACE = "apex"
LIBRARY = "libapex_torch.so"


@dataclass(frozen=True)
class Loaded:
    """What `load()` reached. `kind`: "exact", "portable" or "reference". `module` is 3b (`apex._C`), what stands for it
    under the portable binding, or None; `native` tells whether libapex serves the ops."""

    kind: str
    module: Any
    reason: str

    @property
    def native(self) -> bool:
        return self.kind != "reference"


_fallback: Any = None  # keeps the Python-defined ops alive


@Once
def load() -> Loaded:
    """Brings the dispatcher ops to life, once a process, and returns what was reached (`Loaded`).

    Imports torch first: the bindings find its libraries only when they are mapped. Never opens a GPU driver.
    Raises TwoCopiesError when another copy of apex is loaded already, InstallationError when a listed file is
    missing or cannot be opened, and BindingMismatchError when none fits and APEX_STRICT is set.
    """
    import torch  # noqa: F401  raises where there is none

    library.torch_came()
    _refuse_second_copy()
    reference.register()
    forced = environment.forced_binding()
    machine = probe.for_bindings()
    found = fit(machine)
    assert found is not None
    if forced and found.kind != forced:
        raise _not_there(forced, machine, found)
    if found.kind == "exact":
        return _load_native(found)
    if found.kind == "portable":
        return _load_portable(found.reason)
    if not forced:
        _explain_mismatch(machine, found)
    _define_from_python()
    return Loaded("reference", None, found.reason)


def _not_there(forced: str, machine: Machine, found: Fit) -> ApexError:
    why = (machine.portable if forced == "portable" else None) or found.reason
    return BindingMismatchError(
        f"{environment.BINDING} asks for the {forced} binding: {why}",
        wanted=_wanted(machine),
        remedy=f"{system.unset(environment.BINDING)}, or: {mismatch_remedy(machine, found)}",
    )


def _load_portable(reason: str) -> Loaded:
    global _fallback
    from apex._portable import module

    found, _fallback = module.load()
    sys.modules["apex._C"] = found
    return Loaded("portable", found, reason)


def _load_native(found: Fit) -> Loaded:
    import torch

    assert found.binding is not None
    folder, name = layout.libraries() / found.binding.folder, f"the binding for torch {found.binding.torch}"
    module = _module_path(folder) if found.module else None
    for path in filter(None, (folder / LIBRARY, module)):
        fault = elf.library_fault(path)
        if fault:
            raise _damaged(f"{name} cannot be used: {fault}", path)
    library.load()  # sets the resolver before an op of 3a can ask it
    try:
        torch.ops.load_library(str(folder / LIBRARY))
        _define_from_python(missing_only=True)
        return Loaded("exact", module and _load_module(module), found.reason)
    except (OSError, ImportError) as error:
        why = (
            f"{error}: {error.__cause__}" if error.__cause__ else str(error)
        )  # torch's own text has no reason
        raise _damaged(f"{name} cannot be opened: {why}", folder) from error


def _module_path(folder: Path) -> Path:
    found = [folder / f"_C{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    return next((path for path in found if path.is_file()), found[0])


def _load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("apex._C", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no extension module")
    module = importlib.util.module_from_spec(spec)
    sys.modules["apex._C"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules["apex._C"]
        raise
    return module


def _damaged(what: str, path: Path) -> InstallationError:
    return InstallationError(what, wanted=str(path), remedy=remedies.reinstall())


def entry(module: Any, name: str) -> Any:
    """A binding's entry for an op. Raises BindingMismatchError where it was built before there was that op."""
    found = getattr(module, name, None)
    if found is None:
        remedy = "python -m build_matrix tree" if layout.checkout() else remedies.reinstall()
        raise BindingMismatchError(
            f"the binding that is loaded has no {name}: it was built from other sources than this apex",
            wanted=name,
            found=getattr(module, "__file__", None),
            remedy=remedy,
        )
    return found


def _refuse_second_copy() -> None:
    """A second 3a would die inside torch on the duplicate namespace, with a C++ backtrace for a message."""
    import torch

    ours = layout.libraries().resolve()
    for path in mapped.paths():
        name = Path(path).name
        if name in (LIBRARY, installed.LIBRARY) and ours not in Path(path).resolve().parents:
            raise _two_copies(path)
        if name == LIBRARY:
            return  # ours: an earlier load() got this far and failed after it
    taken = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{NAMESPACE}::")]
    if taken:
        raise _two_copies(f"the dispatcher already holds {taken[0]}")


def _two_copies(found: str) -> TwoCopiesError:
    return TwoCopiesError(
        "two apex are loaded in this process",
        wanted=f"the one in {layout.PACKAGE}",
        found=found,
        remedy="keep one: `python -m apex` lists the apex distributions that are installed",
    )


def _explain_mismatch(machine: Machine, found: Fit) -> None:
    strict = environment.is_on(machine.env, "APEX_STRICT")
    if not machine.bindings and not strict:
        return  # a Python-only installation is no surprise; `python -m apex` says so
    error = BindingMismatchError(
        f"apex runs on its PyTorch reference: {found.reason}",
        wanted=_wanted(machine),
        available=[f"torch {b.torch} {b.python} ({b.built_against})" for b in machine.bindings],
        remedy=mismatch_remedy(machine, found),
    )
    if strict:
        raise error
    warnings.warn(str(error), SlowPathWarning, stacklevel=5)


def _wanted(machine: Machine) -> str:
    return f"a binding for torch {machine.torch.version if machine.torch else 'none'}, {machine.python}"


def mismatch_remedy(machine: Machine, found: Fit) -> str:
    """The command that brings a binding for this machine: the one that the doctor and `which` name."""
    if found.stale:
        return "python -m build_matrix tree"
    own = layout.build_facts().get("distribution")
    return offers.line(machine, [] if layout.checkout() or not own else [(own, layout.version())])


def _define_from_python(missing_only: bool = False) -> None:
    """The ops of namespace `apex` on the reference: all of them, or those that 3a was built without."""
    global _fallback
    import torch

    there = set(torch._C._dispatch_get_all_op_names()) if missing_only else ()
    names = [name for name in registry.schemas() if f"{NAMESPACE}::{name}" not in there]
    if names:
        kind = "FRAGMENT" if missing_only else "DEF"
        _fallback = reference.define(NAMESPACE, reference.target, names, kind=kind)
        reference.record(NAMESPACE, _fallback, names)
