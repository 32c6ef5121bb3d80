"""The host library of each platform (libapex.so, apex.dll): every source of csrc/host, one work unit a file, then one
that links them."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

from build_matrix import REPOSITORY
from build_matrix.parts import interface
from build_matrix.spec import matrix
from build_matrix.store import Store, WorkUnit, digest
from build_matrix.toolchains import host_compiler, inputs, manylinux, windows
from build_matrix.toolchains.host_compiler import HostCompiler

CSRC = REPOSITORY / "csrc"
FLAGS = [
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-fno-math-errno", "-Wall",
    "-Wextra", "-Wno-unknown-pragmas",
    "-fno-trapping-math",  # else g++ keeps loops that choose between two results scalar where masks are not registers
]  # fmt: skip
LINK = [
    "-Wl,-soname,libapex.so",
    "-Wl,--no-undefined",
    f"-Wl,--version-script={CSRC / 'host/apex.map'}",
    "-Wl,--no-as-needed",  # dlopen is in it before glibc 2.34, and in the C library of the machine that links
    "-l:libdl.so.2",
    "-Wl,--as-needed",
    "-lpthread",
]


# Windows aligns stacks to 16 bytes, and GCC takes that for 32 where it keeps an AVX register on one: the assembler
# writes every move of such a register in the form that needs no alignment. Formats are checked where Linux is built:
# here GCC takes them for those of Microsoft's library, which is not the one that prints.
WINDOWS_FLAGS = [
    "-DAPEX_BUILDS_LIBRARY",
    "-Wa,-muse-unaligned-vector-move",
    "-Wno-format",
    "-Wno-format-extra-args",
]


# Loops that choose by one condition several times: g++ would make them paths of their own, which do not vectorise.
ONE_PATH = {"focal_loss_cpu"}


def sources(platform: str = matrix.NATIVE) -> list[Path]:
    """Every source of the library, in the order in which they are linked. Those of windows/ take the places of those
    that have their names."""
    found = {path.name: path for path in CSRC.glob("host/*.cpp")}
    if matrix.load().platform(platform).windows:
        return sorted((found | {path.name: path for path in CSRC.glob("host/windows/*.cpp")}).values())
    return sorted([*found.values(), *host_compiler.compat_sources()])


def flags(source: Path, platform: str = matrix.NATIVE) -> list[str]:
    """The flags that compile a source for a platform."""
    of = matrix.load().platform(platform)
    include = [f"-I{CSRC}", f"-I{CSRC / 'host'}"]
    forced = ["-include", str(host_compiler.COMPAT / "old_glibc.h")]
    # The compat sources are themselves what replaces newer names, and are compiled as C++20 to replace all.
    language = ["-std=c++20"] if source.parent == host_compiler.COMPAT else []
    own = WINDOWS_FLAGS if of.windows else []
    if source.stem in ONE_PATH:
        own = [*own, "-fno-thread-jumps", "-Wno-ignored-optimization-argument"]  # clang++ has no such option
    return [*FLAGS, *language, contraction(source), f"-march={of.baseline}", *own, *include, *forced]


def contraction(source: Path) -> str:
    """Off, so that elementwise ops over lists of tensors round like device code (which has it off, too) and the
    reference. The CPU variants whose sources end in _cpu say gpu::fma where a rounding less is meant, as their kernels
    do: that is one instruction where the machine has one if contraction is on, and elsewhere two roundings."""
    return f"-ffp-contract={'fast' if source.stem.endswith('_cpu') else 'off'}"


def _relative(flags: list[str]) -> list[str]:
    return [flag.replace(str(REPOSITORY), ".") for flag in flags]


def object_unit(source: Path, compiler: HostCompiler, platform: str = matrix.NATIVE) -> WorkUnit:
    """The work unit of one source: its object file."""
    chosen = flags(source, platform)

    def make(folder: Path) -> None:
        read = compiler.compile(source, folder / f"{source.stem}.o", chosen)
        inputs.write(folder, inputs.sort(read, {}, [CSRC]))

    return WorkUnit(
        "object",
        str(source.relative_to(REPOSITORY)) + matrix.load().platform(platform).suffix,
        {
            "source": digest.of_source(source, [CSRC, CSRC / "host"]),
            "forced": digest.of_file(host_compiler.COMPAT / "old_glibc.h"),
            "flags": _relative(chosen),
            "compiler": compiler.describe(),
            "beside": inputs.FILE,
        },
        make,
    )


PORTABLE = CSRC / "portable/fast.cpp"
PORTABLE_MODULE = "apex_portable.abi3.so"
PORTABLE_LINK = [
    "-Wl,-rpath,$ORIGIN", "-Wl,--enable-new-dtags", "-Wl,--no-as-needed", "-l:libapex.so", "-l:libc.so.6",
    "-Wl,--as-needed",
]  # fmt: skip


def _compile_interface(
    compiler: HostCompiler, text: str, work: Path, platform: str
) -> tuple[Path, list[str]]:
    """The object of what the library says of itself (`interface`), and the files that the compiler read."""
    (work / "interface.cpp").write_text(text, encoding="utf-8")
    chosen = [*flags(CSRC / "host/interface.cpp", platform), f"-ffile-prefix-map={work}=."]
    return work / "interface.o", compiler.compile(work / "interface.cpp", work / "interface.o", chosen)


def _build_portable(compiler: HostCompiler, folder: Path, work: Path, platform: str) -> list[str]:
    """The hot parts of the portable binding, beside libapex.so, of whose C interface they hold the digest. It is a
    module of Python's stable ABI, whose functions are found when a Python loads it. Returns the files that were read.
    """
    known = interface.digest(interface.description())
    chosen = [*flags(PORTABLE, platform), f'-DAPEX_INTERFACE_DIGEST="{known}"']
    read = compiler.compile(PORTABLE, work / "fast.o", chosen)
    read += compiler.link([work / "fast.o"], folder / PORTABLE_MODULE, [f"-L{folder}", *PORTABLE_LINK])
    manylinux.check(folder / PORTABLE_MODULE)
    return read


@cache
def source_identity(platform: str = matrix.NATIVE) -> str:
    """The digest of all that a platform's library is made of, whichever compiler makes it."""
    folders = [CSRC, CSRC / "host"]
    of = {str(s.relative_to(CSRC)): digest.of_source(s, folders) for s in sources(platform)}
    return digest.of_values([of, interface.source(), *sorted(map(str, WINDOWS_FLAGS)), *FLAGS])


def build(store: Store, run=None, platform: str = matrix.NATIVE) -> WorkUnit:
    """The work unit of the library. Its objects are built by `run` on the way, or, without it, where they are missing
    when the library is made."""
    compiler = host_compiler.find(platform)
    of = matrix.load().platform(platform)
    units = [object_unit(source, compiler, platform) for source in sources(platform)]
    built = run(units) if run else None
    described = interface.source()

    def make(folder: Path) -> None:
        results = built or [store.build(unit) for unit in units]
        objects = [path for result in results for path in sorted(result.folder.glob("*.o"))]
        work = folder / "work"
        work.mkdir()
        own, read = _compile_interface(compiler, described, work, platform)
        read += compiler.link([*objects, own], folder / of.library, [] if of.windows else LINK)
        if of.windows:
            windows.check(folder / of.library)
        else:
            manylinux.check(folder / of.library)
            read += _build_portable(compiler, folder, work, platform)
        linked = inputs.sort(read, {}, [CSRC, folder, *(result.folder for result in results)])
        shutil.rmtree(work)
        inputs.write(folder, inputs.union([inputs.read(result.folder) for result in results] + [linked]))

    stated = {
        "objects": [unit.key for unit in units],
        "interface": described,
        "portable": [digest.of_source(PORTABLE, [CSRC, CSRC / "host"]), *PORTABLE_LINK],
        "link": _relative(LINK),
        "script": digest.of_file(CSRC / "host/apex.map"),
    }
    if of.windows:
        stated["link"] = host_compiler.WINDOWS_LINK
    return WorkUnit("library", f"{of.library}{of.suffix}", stated, make)


def place(folder: Path, target: Path) -> None:
    """Copies the library, and the module beside it where there is one, out of the store."""
    target.mkdir(parents=True, exist_ok=True)
    for pattern in ("*.so", "*.dll"):
        for path in sorted(folder.glob(pattern)):
            shutil.copyfile(path, target / path.name)
