"""One wheel from end to end: what goes in, its tree, the file in dist/."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from build_matrix.errors import BuildError, Incomplete, PythonMissing, ToolchainMissing
from build_matrix.parts import tree
from build_matrix.spec import matrix
from build_matrix.store import files
from build_matrix.store.engine import Engine
from build_matrix.toolchains import host_compiler, pythons
from build_matrix.toolchains.pythons import Python
from build_matrix.wheels import wheel

LACKING = "nothing was built or downloaded, for what it needs is not here"


def require(tags: Iterable[str], platform: str = matrix.NATIVE) -> None:
    """Raises Incomplete naming all that compiling for these Pythons lacks. Asked before anything large is fetched."""
    if faults := lacking(tags, platform):
        raise Incomplete(faults, LACKING)


def lacking(tags: Iterable[str], platform: str = matrix.NATIVE) -> list[tuple[str, str, str]]:
    """(what, why, the command or nothing) of a C++ compiler and of each Python's headers, where they are not here."""
    faults = []
    for name, find, of in (
        (platform, host_compiler.find, platform),
        *((tag, pythons.find, tag) for tag in tags),
    ):
        try:
            find(of)
        except (PythonMissing, ToolchainMissing) as error:
            faults.append((name, str(error), error.remedy))
    return faults


def request(
    accelerator: str,
    archs: tuple[str, ...],
    torches: tuple[str, ...],
    python: Python | None,
    platform: str = matrix.NATIVE,
) -> tree.Request:
    """Fills in what was not named: every arch of the accelerator, every torch of the matrix for that Python. None: of
    a wheel for every Python, which holds no compiled binding.

    Raises BuildError for an arch of another vendor, for a torch that a rule of the matrix forbids, and for a platform
    that has no wheel of the accelerator.
    """
    axes = matrix.load()
    if reason := axes.why_no_wheel(accelerator, platform):
        raise BuildError(reason)
    for arch in archs:
        if (vendor := axes.pack(arch).arch.vendor) != accelerator:
            raise BuildError(f"{arch} does not go into apex-{accelerator}, but into apex-{vendor}")
    if python is None:
        return tree.Request(accelerator, archs or tuple(axes.archs(accelerator)), platform=platform)
    for torch in torches:
        if reason := axes.why_not(torch, python.tag):
            raise BuildError(f"no binding of torch {torch} for {python.tag}: {reason}")
    return tree.Request(
        accelerator=accelerator,
        archs=archs or tuple(axes.archs(accelerator)),
        torch=torches or tuple(axes.torch_for(python.tag)),
        pythons=(python,),
        platform=platform,
    )


def pure_wheel(accelerator: str, engine: Engine, dist: Path) -> Path:
    """Builds the one wheel of a distribution that is Python alone: no compiler is asked for. Returns the path in
    `dist`."""
    with files.temporary("tree") as target:
        facts = tree.fill_python_only(tree.Request(accelerator), target)
        unit = wheel.pure_unit(target, facts)
    return wheel.publish(engine.one(unit).folder, dist)


def one_wheel(made: tree.Request, python: Python | None, engine: Engine, dist: Path) -> Path:
    """Builds the tree and the wheel of one request, for a Python or, None, every one. Returns the path in `dist`."""
    # A folder of its own: another build of the same accelerator and Python may run beside this one, with other packs.
    with files.temporary("tree") as target:
        facts = tree.fill(made, target, engine)
        unit = wheel.unit(target, facts, python, platform=made.platform, store=engine.store)
    return wheel.publish(engine.one(unit).folder, dist)
