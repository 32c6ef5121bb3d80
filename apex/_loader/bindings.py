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
import os
import sys
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path

from apex._loader import elf, op_model, reference, registry, tree
from apex._loader import fit as fitting
from apex._loader.errors import BindingMismatchError, InstallationError, SlowPathWarning, TwoCopiesError
from apex._loader.fit import Binding, Torch

NAMESPACE = "apex"
LIBRARY = "libapex_torch.so"


@dataclass(frozen=True)
class Loaded:
    """What `load()` reached. `kind`: "exact", "portable" or "reference". `module` is 3b (`apex._C`), what stands for it
    under the portable binding, or None; `native` tells whether libapex serves the ops."""

    kind: str
    module: object
    reason: str

    @property
    def native(self):
        return self.kind != "reference"


def installed():
    """The bindings that bindings.json lists, as a tuple; empty if the file is not there."""
    rows = tree.read_json(tree.libraries() / "bindings.json") or ()
    names = Binding.__dataclass_fields__
    return tuple(Binding(**{key: value for key, value in row.items() if key in names}) for row in rows)


def choose(torch, python, rows, portable=False):
    """The fitting.Fit of the best of `rows`, unless the build is older than the sources it lies in.
    portable: whether the portable binding could serve."""
    found = fitting.choose(torch, python, rows, portable)
    changed = changed_ops() if found.library or found.portable else ()
    if changed:
        text = f"the build in {tree.built()} is older than csrc/ops.schemas: {', '.join(changed)} changed"
        return fitting.Fit(None, False, False, text, stale=True)
    return found


def changed_ops():
    """Ops whose schema is not what the bindings were compiled from; empty for a wheel.

    torch does not notice: a call with other arguments than the compiled ones ends the process.
    """
    path = tree.built_schemas()
    compiled = op_model.parse(path.read_text(encoding="utf-8")) if path else {}
    now = registry.schemas()
    return tuple(name for name in compiled if name not in now or now[name].text != compiled[name].text)


def python_tag():
    """ "cp311" for CPython 3.11; a free-threaded build adds its "t"."""
    free_threaded = "t" if "t" in getattr(sys, "abiflags", "") else ""
    return f"cp{sys.version_info.major}{sys.version_info.minor}{free_threaded}"


def running_torch():
    """The Torch of this process; imports torch."""
    import torch

    return Torch(
        version=str(torch.__version__),
        git_version=getattr(torch.version, "git_version", None),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        cxx11_abi=bool(torch.compiled_with_cxx11_abi()),
    )


_lock = threading.RLock()
_loaded = None
_fallback = None  # keeps the Python-defined ops alive


def load():
    """Brings the dispatcher ops to life, once a process, and returns what was reached (`Loaded`).

    Imports torch first: the bindings find its libraries only when they are mapped. Never opens a GPU driver.
    Raises TwoCopiesError when another copy of apex is loaded already, InstallationError when a listed file is
    missing or cannot be opened, and BindingMismatchError when none fits and APEX_STRICT is set.
    """
    global _loaded
    if _loaded is None:
        with _lock:
            if _loaded is None:
                _loaded = _load()
    return _loaded


def _fresh_lock():
    global _lock
    _lock = threading.RLock()  # a thread that held it does not exist in the child


os.register_at_fork(after_in_child=_fresh_lock)


def _load():
    torch = running_torch()
    _refuse_second_copy()
    reference.register()
    bindings = installed()
    wanted = forced()
    rows = () if wanted in ("portable", "reference") else bindings
    fit = choose(torch, python_tag(), rows, wanted in (None, "portable") and portable_fault() is None)
    if wanted in ("exact", "portable") and fit.kind != wanted:
        why_not = portable_fault() if wanted == "portable" else None
        raise BindingMismatchError(
            f"{FORCED} asks for the {wanted} binding: {why_not or fit.reason}",
            wanted=f"a binding for torch {torch.version}, {python_tag()}",
            remedy=f"unset {FORCED}, or: {mismatch_remedy(torch, fit)}",
        )
    reason = f"{FORCED}={wanted}" if wanted else fit.reason
    if fit.kind == "exact":
        return _load_native(fit)
    if fit.kind == "portable":
        return _load_portable(reason)
    if not wanted:
        _explain_mismatch(torch, bindings, fit)
    _define_from_python()
    return Loaded("reference", None, reason)


FORCED = "APEX_BINDING"


def forced():
    """What APEX_BINDING asks for; None if nothing. Raises InstallationError for a word that is none."""
    word = os.environ.get(FORCED, "").lower() or None
    if word not in (None, "exact", "portable", "reference"):
        raise InstallationError(
            f"{FORCED}={word} names no binding",
            available=["exact", "portable", "reference"],
            remedy=f"unset {FORCED}",
        )
    return word


def portable_fault():
    """Why the portable binding cannot serve, or None. Opens libapex."""
    from apex._loader import library

    reason = library.fault()
    if reason:
        return f"the host library cannot be used: {reason}"
    if not hasattr(library.load().c, "apex_interface"):
        return "the host library is older than the portable binding: it does not describe its interface"
    return None


def _load_portable(reason):
    global _fallback
    from apex._portable import module

    found, _fallback = module.load()
    sys.modules["apex._C"] = found
    return Loaded("portable", found, reason)


def _load_native(fit):
    import torch

    from apex._loader import library

    folder = tree.libraries() / fit.binding.folder
    module = _module_path(folder) if fit.module else None
    for path in filter(None, (folder / LIBRARY, module)):
        fault = elf.library_fault(path)
        if fault:
            raise _damaged(f"the binding for torch {fit.binding.torch} cannot be used: {fault}", path)
    library.load()  # sets the resolver before an op of 3a can ask it
    try:
        torch.ops.load_library(str(folder / LIBRARY))
        _define_from_python(missing_only=True)
        return Loaded("exact", module and _load_module(module), fit.reason)
    except (OSError, ImportError) as error:
        raise _damaged(
            f"the binding for torch {fit.binding.torch} cannot be opened: {error}", folder
        ) from error


def _module_path(folder):
    found = [folder / f"_C{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    return next((path for path in found if path.is_file()), found[0])


def _load_module(path):
    spec = importlib.util.spec_from_file_location("apex._C", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["apex._C"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules["apex._C"]
        raise
    return module


def _damaged(what, path):
    from apex._loader import offers

    return InstallationError(what, wanted=str(path), remedy=offers.reinstall())


def _refuse_second_copy():
    """A second 3a would die inside torch on the duplicate namespace, with a C++ backtrace for a message."""
    import torch

    from apex._loader import mapped

    ours = tree.libraries().resolve()
    for path in mapped.paths():
        name = Path(path).name
        if name in (LIBRARY, "libapex.so") and ours not in Path(path).resolve().parents:
            raise _two_copies(path)
        if name == LIBRARY:
            return  # ours: an earlier load() got this far and failed after it
    taken = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{NAMESPACE}::")]
    if taken:
        raise _two_copies(f"the dispatcher already holds {taken[0]}")


def _two_copies(found):
    return TwoCopiesError(
        "two apex are loaded in this process",
        wanted=f"the one in {tree.PACKAGE}",
        found=str(found),
        remedy="keep one: `python -m apex` lists the apex distributions that are installed",
    )


def _explain_mismatch(torch, bindings, fit):
    if not bindings and not strict():
        return  # a Python-only installation is no surprise; `python -m apex` says so
    error = BindingMismatchError(
        f"apex runs on its PyTorch reference: {fit.reason}",
        wanted=f"a binding for torch {torch.version}, {python_tag()}",
        available=[f"torch {b.torch} {b.python} ({b.built_against})" for b in bindings],
        remedy=mismatch_remedy(torch, fit),
    )
    if strict():
        raise error
    warnings.warn(str(error), SlowPathWarning, stacklevel=5)


def mismatch_remedy(torch, fit):
    """The command that brings a binding for this torch: the one that the doctor and `which` name."""
    if fit.stale:
        return "python -m build_matrix tree"
    from apex._loader import machine, offers

    described = machine.Machine(
        torch=torch, python=python_tag(), system=machine.system(), cards=machine.cards()
    )
    own = (tree.build_facts().get("distribution"), tree.version())
    return offers.line(described, [] if tree.checkout() or not own[0] else [own])


def strict():
    """Whether APEX_STRICT asks for an error where a slower variant would run."""
    return os.environ.get("APEX_STRICT", "0").lower() not in ("", "0", "false", "no", "off")


def _define_from_python(missing_only=False):
    """The ops of namespace `apex` on the reference: all of them, or those that 3a was built without."""
    global _fallback

    def forward(name):
        import torch

        target = getattr(torch.ops.apex_reference, name).default
        return lambda *arguments, **keywords: target(*arguments, **keywords)

    import torch

    there = set(torch._C._dispatch_get_all_op_names()) if missing_only else ()
    names = [name for name in registry.schemas() if f"{NAMESPACE}::{name}" not in there]
    if names:
        _fallback = reference.define(NAMESPACE, forward, names, kind="FRAGMENT" if missing_only else "DEF")
        reference.record(NAMESPACE, _fallback, names)


def ops():
    """Names of the dispatcher ops that `load()` makes available as torch.ops.apex.<name>."""
    return tuple(registry.schemas())
