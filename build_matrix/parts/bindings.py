"""The bindings of one torch: libapex_torch.so (3a) and, for one Python, _C (3b).

Both are ONE translation unit: torch's headers cost seconds a file, an op next to nothing. They are linked
against empty libraries that carry the right sonames, so neither torch's nor apex's libraries are needed to
build them.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from apex._loader.elf import Elf
from build_matrix import REPOSITORY, generator
from build_matrix.errors import GateError
from build_matrix.parts import loads
from build_matrix.spec import matrix, registry
from build_matrix.spec.registry import Registry
from build_matrix.store import Result, WorkUnit, digest
from build_matrix.toolchains import host_compiler, inputs, manylinux, python_headers
from build_matrix.toolchains.headers import TorchHeaders
from build_matrix.toolchains.host_compiler import HostCompiler
from build_matrix.toolchains.pythons import Python

CSRC = REPOSITORY / "csrc"
BINDINGS = CSRC / "bindings"
INCLUDE = [CSRC, BINDINGS]
TORCH_LIBRARY, PYTHON_MODULE = "libapex_torch.so", "_C"
# C++20 for every torch: 2.14 and later need it, older ones take it.
FLAGS = [
    "-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-march={baseline}",
    "-D_GLIBCXX_USE_CXX11_ABI=1", "-Wall",
]  # fmt: skip
TORCH_SYMBOLS = """{
  global: apex_torch_*; extern "C++" { apex::*; typeinfo?for?apex::*; typeinfo?name?for?apex::*;
  vtable?for?apex::*; }; local: *;
};
"""
PYTHON_SYMBOLS = "{ global: PyInit__C; local: *; };\n"


def generated(python: bool) -> dict[str, str]:
    """The generated files that torch_library.cpp or (`python`) python_module.cpp reach, name -> text."""
    every = generator.files(Registry.load().ops(), registry.schemas(), BINDINGS)
    found: dict[str, str] = {}
    seen: set[Path] = set()
    waiting = ["python_ops.inc"] if python else ["ops_schemas.inc", "ops.inc"]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found[name] = every[name]
        reached = digest.reach(_included(every[name]), INCLUDE, seen)
        read = [every[name], *(path.read_text(encoding="utf-8") for path in reached)]
        waiting += [
            included for text in read for included in digest.INCLUDE.findall(text) if included in every
        ]
    return dict(sorted(found.items()))


def _included(text: str) -> list[Path]:
    """The files of this tree that a generated text includes."""
    names = digest.INCLUDE.findall(text)
    return [folder / name for name in names for folder in INCLUDE if (folder / name).is_file()]


def _sources(python: bool) -> list[Path]:
    """3b is what begins with `python`, 3a the rest; torch_library.cpp, which says what unit this is, comes
    first."""
    chosen = [path for path in sorted(BINDINGS.glob("*.cpp")) if path.name.startswith("python") == python]
    return sorted(chosen, key=lambda path: path.name != "torch_library.cpp")


def _identity(inc: dict[str, str], python: bool) -> dict[str, str]:
    """Digests of the files that a unit and its generated texts `inc` reach, by their paths."""
    roots = [path for text in inc.values() for path in _included(text)]
    reached = digest.reach([*roots, *_sources(python), *host_compiler.compat_sources()], INCLUDE)
    found = {str(path.relative_to(REPOSITORY)): path for path in reached}
    return {name: digest.of_file(path) for name, path in sorted(found.items())}


@cache
def source_identity() -> str:
    """Digest of the sources of both bindings and of what they are generated from, as they were when it was first asked
    for."""
    both = [generated(False), generated(True)]
    return digest.of_values([_identity(both[0], False), _identity(both[1], True), *both])


@dataclass(frozen=True)
class _Library:
    """One of the two: `output` is its file, `extra` flags go to the compiler, `link` to the linker, `needed` are the
    sonames that it needs, `symbols` the version script."""

    kind: str
    output: str
    headers: TorchHeaders
    extra: list[str]
    needed: list[str]
    link: list[str]
    symbols: str
    python: Python | None = None

    @property
    def platform(self) -> matrix.Platform:
        return matrix.load().platform(self.headers.platform)

    @property
    def foreign(self) -> bool:
        """Whether a cross compiler makes it."""
        return self.platform.name != matrix.NATIVE

    @property
    def flags(self) -> list[str]:
        """Those that go into the key."""
        return [*(flag.format(baseline=self.platform.baseline) for flag in FLAGS), *self.extra]


def _unit(library: _Library) -> WorkUnit:
    platform, headers, python = library.platform, library.headers, library.python
    compiler = host_compiler.find(platform.name)
    inc = generated(python is not None)
    of = {
        "sources": _identity(inc, python is not None),
        "generated": inc,
        "headers": [headers.release, headers.git_version, headers.identity],
        "flags": library.flags,
        "paths": "mapped",
        "link": [*library.needed, *library.link, library.symbols],
        "compiler": compiler.describe(),
        "python": [python.tag, python.version] if python else [],
        "beside": inputs.FILE,
    }
    if library.foreign:
        of["platform"] = platform.name
    tag = f" {python.tag}" if python else ""

    def make(folder: Path) -> None:
        work = folder / "work"
        (work / "generated").mkdir(parents=True)
        for name, text in inc.items():
            (work / name).write_text(text)
        objects, read, parts = _compile(library, compiler, work)
        read += _link(library, compiler, objects, work)
        manylinux.check(folder / library.output)
        inputs.write(folder, inputs.sort(read, parts, [CSRC, work]))
        shutil.rmtree(work)

    return WorkUnit(library.kind, f"torch {headers.release}{tag}{platform.suffix}", of, make)


def _compile(library: _Library, compiler: HostCompiler, work: Path) -> tuple[list[Path], list, dict]:
    """Objects of the one unit and of the sources that old systems lack, what was read for them, and the headers that
    are not ours by their names in provenance."""
    headers, python = library.headers, library.python
    unit = work / f"{library.output.partition('.')[0]}.cpp"
    unit.write_text("".join(f'#include "bindings/{path.name}"\n' for path in _sources(python is not None)))
    include = [f"-I{work}", *(f"-I{path}" for path in INCLUDE)]
    names = {headers.include: "torch/include", work.parent: "."}
    parts = {"torch": [headers.include]}
    if python:
        own = python.include
        if library.foreign:
            python_headers.lay(python, compiler, own := work / "python")
        include += ["-isystem", str(own)]
        names[own] = "python"
        parts["python"] = [own, *python.also]
    hidden = [f"-ffile-prefix-map={path}={name}" for path, name in names.items()]
    forced = ["-include", str(host_compiler.COMPAT / "old_glibc.h")]
    objects = [work / "unit.o"]
    read = compiler.compile(unit, objects[0], [*library.flags, *forced, *include, *headers.flags(), *hidden])
    for source in host_compiler.compat_sources():
        objects.append(work / f"{source.stem}.o")
        read += compiler.compile(source, objects[-1], ["-std=c++20", "-O2", "-fPIC", *forced, f"-I{CSRC}"])
    return objects, read, parts


def _link(library: _Library, compiler: HostCompiler, objects: list[Path], work: Path) -> list:
    """Links against empty libraries of the right sonames. Returns what was read."""
    for soname in library.needed:
        compiler.stub(soname, work)
    (work / "symbols.map").write_text(library.symbols)
    libraries = ["-Wl,--no-as-needed", *(f"-l:{soname}" for soname in library.needed), "-Wl,--as-needed"]
    script = f"-Wl,--version-script={work / 'symbols.map'}"
    return compiler.link(
        objects, work.parent / library.output, [f"-L{work}", *libraries, *library.link, script]
    )


def torch_library(headers: TorchHeaders) -> WorkUnit:
    """3a: needs c10 and torch_cpu, and libapex.so one folder up."""
    needed = ["libapex.so", "libc10.so", "libtorch_cpu.so"]
    link = [
        f"-Wl,-soname,{TORCH_LIBRARY}",
        "-Wl,-rpath,$ORIGIN/..",
        "-Wl,--enable-new-dtags",
        "-l:libdl.so.2",
    ]
    return _unit(_Library("3a", TORCH_LIBRARY, headers, [], needed, link, TORCH_SYMBOLS))


def python_module(headers: TorchHeaders, python: Python) -> WorkUnit:
    """3b: needs 3a beside it, and torch_python."""
    extra = [f"-DTORCH_EXTENSION_NAME={PYTHON_MODULE}"]
    needed = [TORCH_LIBRARY, "libapex.so", "libc10.so", "libtorch_cpu.so", "libtorch_python.so"]
    link = ["-Wl,-rpath,$ORIGIN:$ORIGIN/..", "-Wl,--enable-new-dtags"]
    output = f"{PYTHON_MODULE}{python.suffix_on(headers.platform)}"
    return _unit(_Library("3b", output, headers, extra, needed, link, PYTHON_SYMBOLS, python))


def place(results: list[Result], minor: str, library: Path) -> Path:
    """Copies what was built into `library`/torch2.13. Returns that folder."""
    target = library / f"torch{minor}"
    target.mkdir(parents=True, exist_ok=True)
    for result in results:
        for path in result.folder.glob("*.so"):
            shutil.copyfile(path, target / path.name)
    return target


def entry(headers: TorchHeaders, python: Python) -> dict[str, object]:
    """A line of bindings.json. The grade says what is known when it was built; receipts raise it."""
    return {
        "torch": headers.minor,
        "built_against": headers.version,
        "git_version": headers.git_version,
        "python": python.tag,
        "cxx11_abi": True,
        "folder": f"torch{headers.minor}",
        "grade": _load_grade(headers, python) or loads.NEVER,
    }


def _load_grade(headers: TorchHeaders, python: Python) -> str | None:
    return loads.grade(headers.release, python.tag, source_identity(), platform=headers.platform)


def check_symbols(libapex: Path, bindings: list[Path]) -> None:
    """Stubs let anything link: raises GateError where a binding wants what libapex.so does not export."""
    exported = {s.name for s in Elf.read(libapex).symbols(dynamic=True) if s.defined}
    for path in bindings:
        symbols = Elf.read(path).symbols(dynamic=True)
        wanted = {s.name for s in symbols if not s.defined and s.name.startswith("apex_")}
        own = {
            s.name for p in path.parent.glob("*.so") for s in Elf.read(p).symbols(dynamic=True) if s.defined
        }
        if missing := sorted(wanted - exported - own):
            raise GateError(
                str(path.name), [f"wants {name}, which libapex.so does not export" for name in missing]
            )
