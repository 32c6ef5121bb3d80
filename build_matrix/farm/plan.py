"""Which steps a release is made of, and which are left out and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from build_matrix import REPOSITORY
from build_matrix.errors import BuildError, Incomplete, PinError, PythonMissing, ToolchainMissing
from build_matrix.farm.steps import Step
from build_matrix.parts import host_library
from build_matrix.spec import matrix
from build_matrix.spec.registry import device_units
from build_matrix.toolchains import by_arch, host_compiler, pythons


@dataclass(frozen=True)
class Selection:
    """What of the matrix is built; empty means everything. `torches` are releases, `pythons` tags, `platforms`
    linux_x86_64 and the like."""

    accelerators: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()
    torches: tuple[str, ...] = ()
    pythons: tuple[str, ...] = ()
    only: tuple[str, ...] = ()  #: of PARTS; wheels are all of it
    tests: tuple[str, ...] = ()  #: archs whose wheel is tried on a worker that offers such a card
    platforms: tuple[str, ...] = ()


PARTS = {"library": ("object", "library"), "bindings": ("headers", "3a", "3b"), "packs": ("code",)}


@dataclass(frozen=True)
class Plan:
    """Steps in an order in which each comes after those it needs."""

    steps: tuple[Step, ...]
    left_out: tuple[str, ...] = ()

    def count(self) -> dict[str, int]:
        """Steps by kind."""
        kinds = [step.kind for step in self.steps]
        return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


def resolve(selection: Selection) -> Selection:
    """The selection with every axis spelled out. Raises BuildError for a value that the matrix does not
    have."""
    axes = matrix.load()
    archs = selection.archs or tuple(p.arch.name for p in axes.packs)
    vendors = {axes.pack(arch).arch.vendor for arch in archs}
    wanted = vendors if selection.archs else {a.name for a in axes.accelerators}
    accelerators = selection.accelerators or tuple(a.name for a in axes.accelerators if a.name in wanted)
    for name in accelerators:
        if not axes.accelerator(name).pure and name not in vendors and name != "cpu":
            raise BuildError(f"no arch of {name} was chosen: its wheel would hold no pack")
    _check_axes(selection, accelerators)
    archs = tuple(arch for arch in archs if axes.pack(arch).arch.vendor in accelerators)
    everything = (*axes.python, *axes.optional_python)
    for value, known, what in (
        *((torch, axes.torch, "torch") for torch in selection.torches),
        *((tag, everything, "Python") for tag in selection.pythons),
    ):
        if value not in known:
            raise BuildError(f"{what} {value} is not in matrix.toml; there are {', '.join(known)}")
    for part in selection.only:
        if part not in PARTS:
            raise BuildError(f"{part} is no part of a release; there are {', '.join(PARTS)}")
    if selection.only and selection.tests:
        raise BuildError("--test tries a wheel, and --only makes none: say one of them")
    torches = selection.torches or axes.torch
    platforms = tuple(p.name for p in axes.platforms if _serves(p, selection, accelerators))
    for name in selection.platforms:
        if axes.platform(name) and name not in platforms:
            raise BuildError(axes.why_no_wheel(accelerators[0], name))
    return replace(
        selection,
        accelerators=accelerators,
        archs=archs,
        torches=torches,
        pythons=selection.pythons or everything,
        platforms=platforms,
    )


def _check_axes(selection: Selection, accelerators: tuple[str, ...]) -> None:
    """Raises BuildError where nothing of an axis that was named goes into a wheel of these accelerators: it would be
    left out without a word."""
    axes, names = matrix.load(), ", ".join(f"apex-{name}" for name in accelerators)
    vendors = {arch: axes.pack(arch).arch.vendor for arch in selection.archs}
    if vendors and not set(vendors.values()) & set(accelerators):
        arch, vendor = next(iter(vendors.items()))
        raise BuildError(f"{arch} does not go into {names}, but into apex-{vendor}")
    named = {"--torch": selection.torches, "--python": selection.pythons, "--only": selection.only}
    if not axes.compiled(accelerators) and (given := [option for option, values in named.items() if values]):
        raise BuildError(f"{given[0]} does not belong to {names}: it is Python alone, one wheel for all")


def hosts(selection: Selection) -> tuple[str, ...]:
    """Of a resolved selection, the platforms that something is compiled for: wheels that are Python alone need none."""
    axes = matrix.load()
    compiled = set(axes.compiled(selection.accelerators))
    return tuple(name for name in selection.platforms if compiled & set(axes.platform(name).accelerators))


def _serves(platform: matrix.Platform, selection: Selection, accelerators: tuple[str, ...]) -> bool:
    """Whether a platform was chosen, and has a wheel of what was chosen."""
    wanted = not selection.platforms or platform.name in selection.platforms
    return wanted and bool(set(accelerators) & set(platform.accelerators))


def make(selection: Selection, available: bool = False, check: bool = True) -> Plan:
    """The plan of a release. With `check`, every toolchain and interpreter must be on this machine: raises
    Incomplete naming all that is missing, or, with `available`, leaves out what needs it. An optional Python
    that is not here is always left out."""
    if not check:
        return Plan(tuple(_steps(resolve(selection))))
    here, optional, required = look(selection)
    if required and not available:
        raise Incomplete(required)
    left_out = tuple(f"{name}: {why}" for name, why, _ in (*optional, *required))
    return Plan(tuple(_steps(here)), left_out)


def whole(selection: Selection) -> tuple[Plan, Incomplete | None]:
    """The plan of the whole release, whatever is here, and what is missing here. Optional Pythons as in `make`."""
    _, optional, required = look(selection)
    chosen, absent = resolve(selection), [name for name, *_ in optional]
    chosen = replace(chosen, pythons=tuple(tag for tag in chosen.pythons if tag not in absent))
    left_out = tuple(f"{name}: {why}" for name, why, _ in optional)
    return Plan(tuple(_steps(chosen)), left_out), Incomplete(required) if required else None


Faults = list[tuple[str, str, str]]  # what of the matrix, what is missing for it, the command or nothing


def look(selection: Selection) -> tuple[Selection, Faults, Faults]:
    """(what of a selection can be built here, what is missing for optional Pythons, what is missing besides)"""
    chosen = resolve(selection)
    tags, archs, platforms, missing = [], [], [], []
    compiled = hosts(chosen)
    if not compiled:
        return chosen, [], []  # Python alone: no interpreter and no compiler is asked for
    axes = matrix.load()
    bound = not all(axes.platform(name).windows for name in compiled)
    for tag in chosen.pythons:
        if bound and (not selection.only or "bindings" in selection.only):
            _try(lambda tag=tag: pythons.find(tag), tag, tags, missing)
    for arch in chosen.archs:
        if not selection.only or "packs" in selection.only:
            _try(lambda arch=arch: by_arch.toolchain_for(arch), arch, archs, missing)
    for name in chosen.platforms:
        if name not in compiled:
            platforms.append(name)
        elif set(selection.only) != {"packs"}:
            _try(lambda name=name: host_compiler.find(name), name, platforms, missing)
    optional = [fault for fault in missing if fault[0] in matrix.load().optional_python]
    here = replace(
        chosen,
        pythons=tuple(tags) if bound else chosen.pythons,
        archs=tuple(archs),
        platforms=tuple(platforms),
    )
    return here, optional, [fault for fault in missing if fault not in optional]


def _try(find: Callable, name: str, found: list[str], missing: Faults) -> None:
    try:
        find()
        found.append(name)
    except (PythonMissing, ToolchainMissing, PinError) as error:
        missing.append((name, str(error), getattr(error, "remedy", "")))


def _steps(chosen: Selection) -> list[Step]:
    axes = matrix.load()
    cells = [(t, p) for t in chosen.torches for p in chosen.pythons if not axes.why_not(t, p)]
    device = [path.stem for path in device_units()]

    steps = [step for name in hosts(chosen) for step in _host(axes.platform(name), cells)]
    steps += [Step("code", f"{arch}/{source}", (arch, source)) for arch in chosen.archs for source in device]
    if chosen.only:
        kinds = {kind for part in chosen.only for kind in PARTS[part]}
        return [step for step in steps if step.kind in kinds]
    steps += [_wheel(*wheel, cells, chosen.archs, device) for wheel in _wheels(chosen, cells)]
    return steps + [_test(arch, chosen, cells) for arch in chosen.tests]


def _host(platform: matrix.Platform, cells: list[tuple[str, str]]) -> list[Step]:
    """What is compiled for a platform: the host library, and, but for Windows, the bindings of every (torch,
    Python)."""
    cells = [] if platform.windows else cells
    torches = list(dict.fromkeys(torch for torch, _ in cells))
    on, name = platform.suffix, platform.name
    sources = [str(path.relative_to(REPOSITORY)) for path in host_library.sources(name)]
    objects = tuple(f"object {source}{on}" for source in sources)
    return [
        *(Step("headers", f"torch-{t}{on}", (t, name)) for t in torches),
        *(Step("object", f"{source}{on}", (source, name)) for source in sources),
        Step("library", f"{platform.library}{on}", (name,), objects),
        *(Step("3a", f"torch {t}{on}", (t, name), (f"headers torch-{t}{on}",)) for t in torches),
        *(Step("3b", f"torch {t} {p}{on}", (t, p, name), (f"headers torch-{t}{on}",)) for t, p in cells),
    ]


def _wheels(chosen: Selection, cells: list[tuple[str, str]]) -> list[tuple[str, str, str]]:
    """(accelerator, Python, platform) of each wheel; a Python that no chosen torch serves has none. One for Windows
    is for py3, and one that is Python alone is made once, for py3."""
    served = {tag for _, tag in cells}
    axes = matrix.load()
    tags = [tag for tag in chosen.pythons if tag in served]
    pure = [name for name in chosen.accelerators if axes.accelerator(name).pure]
    return [
        (name, tag, platform)
        for platform in chosen.platforms
        for name in axes.compiled(chosen.accelerators)
        for tag in (["py3"] if axes.platform(platform).windows else tags)
        if not axes.why_no_wheel(name, platform)
    ] + [
        (name, "py3", next(p for p in chosen.platforms if not axes.why_no_wheel(name, p)))
        for name in pure
        if any(not axes.why_no_wheel(name, p) for p in chosen.platforms)
    ]


def _wheel(
    accelerator: str, tag: str, platform: str, cells: list, archs: tuple[str, ...], device: list[str]
) -> Step:
    axes = matrix.load()
    if axes.accelerator(accelerator).pure:
        name = f"{axes.accelerator(accelerator).distribution} {tag}"
        return Step("wheel", name, (accelerator, tag, "", "", platform))
    torches = [torch for torch, python in cells if python == tag]
    own = [arch for arch in archs if axes.pack(arch).arch.vendor == accelerator]
    on = axes.platform(platform).suffix
    needs = [f"library {axes.platform(platform).library}{on}"]
    needs += [f"3a torch {torch}{on}" for torch in torches]
    needs += [f"3b torch {torch} {tag}{on}" for torch in torches]
    needs += [f"code {arch}/{source}" for arch in own for source in device]
    name = f"{axes.accelerator(accelerator).distribution} {tag}{on}"
    return Step("wheel", name, (accelerator, tag, " ".join(torches), " ".join(own), platform), tuple(needs))


def _test(arch: str, chosen: Selection, cells: list[tuple[str, str]]) -> Step:
    """The tests of the wheel that a worker with that card can install: it runs the Python that plans."""
    tag, vendor = pythons.own_tag(), matrix.load().pack(arch).arch.vendor
    if arch not in chosen.archs or (vendor, tag, matrix.NATIVE) not in _wheels(chosen, cells):
        raise BuildError(
            f"the tests on {arch} want the wheel apex-{vendor} for {tag}, which is not in this plan"
        )
    distribution = matrix.load().accelerator(vendor).distribution
    return Step("test", f"{distribution} {tag} {arch}", (arch,), (f"wheel {distribution} {tag}",), arch)
