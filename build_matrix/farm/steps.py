"""Steps: each names one work unit by plain values, so that any worker can make it from a checkout of its own.

What a step gives back is small; outputs meet in the store.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from build_matrix import REPOSITORY
from build_matrix.errors import BuildError
from build_matrix.farm import gpu_test
from build_matrix.parts import bindings, host_library, packs, tree
from build_matrix.spec import matrix
from build_matrix.store import Result, Store, WorkUnit, digest, files
from build_matrix.store.engine import Engine
from build_matrix.toolchains import by_arch, headers, host_compiler, pythons
from build_matrix.wheels import wheel

INPUTS = ("apex", "csrc", "build_matrix", "related_commits", "version.txt", "README.md", "LICENSE")


@dataclass(frozen=True)
class Step:
    """`needs` are the names of the steps whose outputs it reads; `resource` is what a worker must offer to be
    given it (`gfx942`, `sm_90`)."""

    kind: str
    name: str
    arguments: tuple[str, ...]
    needs: tuple[str, ...] = ()
    resource: str = ""

    @property
    def id(self) -> str:
        """What other steps name it by in `needs`."""
        return f"{self.kind} {self.name}"


@dataclass(frozen=True)
class Done:
    """A step that was run, or whose output was stored. `key` says where in the store the output lies."""

    kind: str
    name: str
    key: str
    seconds: float
    size: int
    stored: bool


def unit(step: Step, store: Store, needs: tuple[Done, ...] = ()) -> WorkUnit:
    """The work unit that a step names, as this checkout and this machine's compilers make it."""
    if step.kind == "test":
        return gpu_test.unit(store, *step.arguments, wheel=needs[0].key)
    return UNITS[step.kind](store, *step.arguments)


def run(step: Step, place: str, checkout: str, *needs: Done) -> Done:
    """Makes the step's output in the store at `place`, unless it is there, after its `needs`.

    Raises BuildError on a worker whose checkout is not the one that was planned.
    """
    if (have := checkout_digest()) != checkout:
        raise BuildError(
            f"the checkout of this worker ({REPOSITORY}) is {have[:12]}, the plan's {checkout[:12]}"
        )
    store = Store.at(place)
    result = store.build(unit(step, store, needs))
    return Done(step.kind, step.name, result.unit.key, result.seconds, result.size, result.stored)


def checkout_digest() -> str:
    """One digest of every file of the checkout that a unit can depend on. A file is read again when its size or time of
    change is another: every step asks."""
    found = []
    for name in INPUTS:
        place = REPOSITORY / name
        inside = digest.files(place) if place.is_dir() else [("", str(place))] if place.is_file() else []
        found += [(f"{name}/{file}".rstrip("/"), path) for file, path in inside]
    return digest.of_values([(name, _digest_of(path)) for name, path in found if not _left_out(name)])


def _left_out(name: str) -> bool:
    return name.endswith(files.OUTPUTS) or "receipts" in name.split("/")


_DIGESTS: dict[str, tuple[tuple[int, int], str]] = {}


def _digest_of(path: str) -> str:
    stat = os.stat(path)
    stats = stat.st_size, stat.st_mtime_ns
    if _DIGESTS.get(path, (None, ""))[0] != stats:
        _DIGESTS[path] = stats, digest.of_file(path)
    return _DIGESTS[path][1]


class _Stored(Engine):
    """Runs nothing: every unit must have been made by an earlier step."""

    def run(self, units: list[WorkUnit]) -> list[Result]:
        results = [self.store.find(unit) for unit in units]
        for unit, result in zip(units, results, strict=True):
            if result is None:
                raise BuildError(
                    f"{unit.kind} {unit.name} is not in {self.store.place} as this worker's compilers would make it, "
                    "though the plan made it there: the compilers of its workers differ. `nox -s toolchain` shows "
                    "those of a machine, and brings others"
                )
        return results


def _headers(store: Store, torch: str, platform: str = matrix.NATIVE) -> WorkUnit:
    return headers.unit(torch, platform)


def _object(store: Store, source: str, platform: str = matrix.NATIVE) -> WorkUnit:
    return host_library.object_unit(REPOSITORY / source, host_compiler.find(platform), platform)


def _library(store: Store, platform: str = matrix.NATIVE) -> WorkUnit:
    return host_library.build(store, platform=platform)


def _torch_library(store: Store, torch: str, platform: str = matrix.NATIVE) -> WorkUnit:
    return bindings.torch_library(headers.published(torch, store, platform))


def _python_module(store: Store, torch: str, tag: str, platform: str = matrix.NATIVE) -> WorkUnit:
    return bindings.python_module(headers.published(torch, store, platform), pythons.find(tag))


def _code(store: Store, arch: str, source: str) -> WorkUnit:
    (found,) = packs.units(arch, by_arch.toolchain_for(arch), [source])
    return found


def _wheel(
    store: Store, accelerator: str, tag: str, torches: str, archs: str, platform: str = matrix.NATIVE
) -> WorkUnit:
    if matrix.load().accelerator(accelerator).pure:
        with files.temporary("tree") as folder:
            return wheel.pure_unit(folder, tree.fill_python_only(tree.Request(accelerator), folder))
    python = None if tag == wheel.ANY_PYTHON else pythons.find(tag)
    request = tree.Request(
        accelerator=accelerator,
        archs=tuple(archs.split()),
        torch=tuple(torches.split()),
        pythons=(python,) if python else (),
        published=True,
        platform=platform,
    )
    with files.temporary("tree") as folder:
        facts = tree.fill(request, folder, _Stored(store))
        # holds the contents of the tree
        return wheel.unit(folder, facts, python, platform=platform, store=store)


UNITS = {
    "headers": _headers,
    "object": _object,
    "library": _library,
    "3a": _torch_library,
    "3b": _python_module,
    "code": _code,
    "wheel": _wheel,
}
