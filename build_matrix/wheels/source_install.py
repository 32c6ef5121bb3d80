"""What `pip install .` builds: the Python that runs it, the torch that is installed, and the packs that were
asked for.

Needs nothing that torch does not bring. Pins do not bind a source build: any compiler that is here serves.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from build_matrix.errors import BuildError, PythonMissing, RequirementMissing, ToolchainMissing
from build_matrix.parts import tree
from build_matrix.spec import identity, matrix
from build_matrix.spec.archs import Arch
from build_matrix.spec.registry import Extension, Registry, device_units
from build_matrix.store import Result, Store
from build_matrix.store.engine import Engine
from build_matrix.toolchains import Toolchain, headers, host_compiler, of_vendor, pythons
from build_matrix.wheels import stand_in, wheel

ARCH_VARIABLES = {"cuda": "TORCH_CUDA_ARCH_LIST", "rocm": "PYTORCH_ROCM_ARCH"}


def version() -> str:
    """BUILD_VERSION, else version.txt."""
    return os.environ.get("BUILD_VERSION") or identity.version()


def take_options(arguments: list[str], registry: Registry) -> list[str]:
    """Removes the other tree's options (--cpp_ext, ...) from setup.py's `arguments`, in place; returns
    them."""
    known = set(registry.options())
    options = [argument for argument in arguments if argument in known]
    arguments[:] = [argument for argument in arguments if argument not in known]
    return options


def vendor() -> str:
    """cuda or rocm, as the installed torch was built; for a CPU build whichever compiler is here."""
    text = _torch_version_file()
    if re.search(r"^hip\b.*=\s*['\"]", text, re.MULTILINE):
        return "rocm"
    if re.search(r"^cuda\b.*=\s*['\"]", text, re.MULTILINE):
        return "cuda"
    return "cuda" if of_vendor("cuda") or not of_vendor("rocm") else "rocm"


def say_hipblaslt(built: bool) -> None:
    """The line by which ROCm's setup.py tells whether products may be hipBLASLt's: libapex opens it at run time, so
    wherever that is built. Nothing beside a torch that is not ROCm's."""
    if headers.installed_version() and vendor() == "rocm":
        print(f"INFO: IS_HIPBLASLT_SUPPORTED value is {built}")


def _torch_version_file() -> str:
    import importlib.metadata

    return Path(str(importlib.metadata.distribution("torch").locate_file("torch/version.py"))).read_text()


def archs(of: str, environment: Mapping[str, str]) -> list[str]:
    """What TORCH_CUDA_ARCH_LIST (8.0;9.0+PTX) or PYTORCH_ROCM_ARCH (gfx90a;gfx942) names, else the whole
    matrix."""
    named = environment.get(ARCH_VARIABLES[of], "").replace(",", ";").replace(" ", ";")
    if not named.strip(";"):
        return matrix.load().archs(of)
    found = []
    for part in filter(None, named.split(";")):
        if of == "rocm":
            found.append(part.partition(":")[0])
            continue
        match = re.fullmatch(r"(\d+)\.(\d)[af]?(\+PTX)?", part)
        if not match:
            raise BuildError(f"{ARCH_VARIABLES[of]}: {part!r} is no arch; say 9.0 or 9.0+PTX")
        number = match[1] + match[2]
        found += [f"sm_{number}", *([f"compute_{number}"] if match[3] else [])]
    return list(dict.fromkeys(found))


def toolchains(of: str, wanted: list[str], said: bool, asked_by: str) -> dict[str, Toolchain]:
    """arch -> the first compiler here that knows it, those of the matrix's list for that arch before others. An arch
    that was `said` by name and that none knows is an error; one of the matrix is left out. Raises RequirementMissing
    when no compiler is here at all."""
    here = of_vendor(of)
    if not here:
        remedy = "nox -s toolchain -- nvcc-13.0" if of == "cuda" else "nox -s toolchain -- clang-hip-7.2"
        compiler = "nvcc or NVRTC" if of == "cuda" else "clang of ROCm"
        raise RequirementMissing(f"a device compiler ({compiler})", asked_by, remedy)
    found = {}
    for arch in wanted:
        for toolchain in sorted(here, key=lambda t, arch=arch: _place(t, arch)):
            if toolchain.knows(Arch(arch)):
                found[arch] = toolchain
                break
        else:
            if said:
                names = ", ".join(f"{t.name} {t.version}" for t in here)
                raise BuildError(f"{arch}: no compiler here knows it ({names})")
    return found


def _place(toolchain: Toolchain, arch: str) -> int:
    """Where a compiler stands in the matrix's list for an arch; behind all of it where it does not."""
    names = next((pack.toolchains for pack in matrix.load().packs if pack.arch.name == arch), ())
    of = f"{toolchain.name}-{toolchain.version}."
    return next((at for at, name in enumerate(names) if of.startswith(f"{name}.")), len(names))


def request(asked: list[Extension]) -> tree.Request:
    """What the asked extensions make of the tree. Raises RequirementMissing without torch."""
    torch = headers.installed_version()
    if torch is None:
        what = "torch (pip's build isolation hides an installed one)"
        raise RequirementMissing(
            what, "the build", "pip install . --no-build-isolation, with torch installed"
        )
    common = {
        "version": version(),
        "distribution": "apex",
        "local": "",
        "torch": (torch,),
        "pythons": (pythons.find(pythons.own_tag()),),
    }
    device = [extension for extension in asked if extension.group == "cuda" and extension.ops]
    if not device:
        return tree.Request(**common)
    of = vendor()
    said = bool(os.environ.get(ARCH_VARIABLES[of], "").strip())
    by_arch = toolchains(of, archs(of, os.environ), said, ", ".join(e.variable for e in device))
    return tree.Request(
        **common,
        accelerator=of,
        archs=tuple(by_arch),
        toolchains=by_arch,
        units=tuple(units(device)),
        lenient=True,
    )


def units(asked: list[Extension]) -> list[str]:
    """The device units of extensions: of their ops, and every helper unit, which belongs to no op."""
    registry = Registry.load()
    ops = {op for extension in asked for op in extension.ops}
    others = set(registry.device_ops()) - ops
    return [path.stem for path in device_units() if path.stem not in others]


def build(asked: list[Extension], target: Path) -> None:
    """Fills `target` (setuptools' build folder, or build/tree) with the built parts and the top-level
    modules."""

    def tell(result: Result) -> None:
        if not result.stored:
            print(f"apex: {result.unit.kind} {result.unit.name}: {result.seconds:.1f} s", file=sys.stderr)

    absent = [extension.name for extension in asked if extension.state == "planned"]
    if absent:
        print(f"apex: not in this build, left out: {', '.join(absent)}", file=sys.stderr)
    try:
        host_compiler.find()
        pythons.find(pythons.own_tag())
    except (PythonMissing, ToolchainMissing) as error:
        if asked:
            raise
        print(f"apex: {error}. Without it this installation runs on the PyTorch reference.", file=sys.stderr)
        say_hipblaslt(False)
        tree.fill_python_only(tree.Request(version=version(), distribution="apex", local=""), target)
        return
    made = request(asked)
    place = tree.DEFAULT.parent / "source"
    tree.fill(made, place, Engine(Store(), tell=tell))
    say_hipblaslt(True)
    _copy(place / "apex", target / "apex")
    own = stand_in.files("apex", version())
    for name, text in (wheel.legacy_modules() | own).items():
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_bytes(text)


def _copy(source: Path, target: Path) -> None:
    for path in source.rglob("*"):
        if path.is_file():
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())
