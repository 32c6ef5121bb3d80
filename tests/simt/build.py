"""Builds the device sources and the SIMT executor into one shared library per flavour and warp size.

Objects and libraries lie in the build's store (``APEX_STORE``, else ``build/store``), under ``tests/simt``, named by
the hash of everything that went into them, so only what changed is compiled, by one process.
``python3 tests/simt/build.py plain 32`` prints the library's path.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pathlib
import re
import subprocess
import sys
from dataclasses import dataclass, field

from filelock import FileLock, Timeout

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEVICE = ROOT / "csrc" / "device"
TESTING = ROOT / "csrc" / "testing"
SELFTEST = TESTING / "selftest.cu"
STORE = pathlib.Path(os.environ.get("APEX_STORE") or ROOT / "build" / "store").absolute()
OUTPUT = STORE / "tests" / "simt"
INCLUDES = (ROOT / "csrc", DEVICE)
WARP_SIZES = (32, 64)

# Contraction is off as in the packs. Hidden, and without unique symbols: several of these libraries are
# loaded into one process, and each must keep to its own executor.
COMMON = (
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
    "-DGPU_SIMT",
)
ENGINE = ("fiber.cpp", "block.cpp", "fault.cpp", "launch.cpp")


@dataclass(frozen=True)
class Flavour:
    """How one build is compiled.

    Attributes:
        name: plain, asan or race.
        kernel_flags: for device sources.
        engine_flags: for the executor itself.
        link_flags: for the library.
        engine: sources of the executor.
        sanitized: needs AddressSanitizer preloaded, and takes its memory from it.
    """

    name: str
    kernel_flags: tuple[str, ...]
    engine_flags: tuple[str, ...]
    link_flags: tuple[str, ...] = ()
    engine: tuple[str, ...] = ENGINE
    sanitized: bool = False


_SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
FLAVOURS = {
    flavour.name: flavour
    for flavour in (
        Flavour("plain", ("-O2", "-g1"), ("-O2", "-g1")),
        # Unoptimized: compiled in a fifth of the time, and no access that a sanitizer would look at is left out.
        Flavour(
            "asan", ("-O0", "-g1", *_SANITIZERS), ("-O1", "-g1", *_SANITIZERS), _SANITIZERS, sanitized=True
        ),
        # The compiler's hooks without their runtime: race.cpp defines them. The executor has none.
        Flavour(
            "race",
            ("-O1", "-g", "-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"),
            ("-O2", "-g1"),
            (),
            (*ENGINE, "race.cpp"),
        ),
    )
}


@dataclass
class Library:
    """A built library.

    Attributes:
        path: the shared object; it lacks the units in `failures`.
        failures: what the compiler said of each device source that does not compile.
        warnings: what it said of each that compiles with warnings.
    """

    path: pathlib.Path
    failures: dict[str, str] = field(default_factory=dict)
    warnings: dict[str, str] = field(default_factory=dict)


def device_sources() -> list[pathlib.Path]:
    """The sources of every unit, sorted."""
    return sorted(DEVICE.glob("*.cu"))


def compiler() -> str:
    """The host compiler: ``CXX``, or g++."""
    return os.environ.get("CXX", "g++")


@functools.cache
def _compiler_version(name: str) -> str:
    return subprocess.run([name, "--version"], check=True, capture_output=True, text=True).stdout


def _with_includes(source: pathlib.Path) -> list[pathlib.Path]:
    """The source and every file of this project that it includes, directly or not, in a fixed order."""
    found: dict[pathlib.Path, None] = {}

    def visit(path: pathlib.Path) -> None:
        if path in found:
            return
        found[path] = None
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE):
            for folder in (path.parent, *INCLUDES):
                if (folder / name).is_file():
                    visit((folder / name).resolve())
                    break

    visit(source.resolve())
    return list(found)


def _digest(*parts: str | bytes) -> str:
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()[:20]


def _run_once(command: list[str], output: pathlib.Path, patience: float = -1) -> str:
    """Runs a compiler that writes `output`, by way of a temporary name. Returns its messages.

    Args:
        command: the compiler, without its -o.
        output: made by one process at a time; others wait, and take what it made.
        patience: how long to wait for that process, in seconds; -1: until it is done.

    Raises:
        subprocess.CalledProcessError: the compiler failed; its messages are in `stderr`.
        filelock.Timeout: another process is still making it.
    """
    log = output.with_suffix(output.suffix + ".log")
    if not output.exists():
        output.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(output.with_suffix(".lock"), timeout=patience):
            if not output.exists():
                temporary = output.with_suffix(f".{os.getpid()}.tmp")
                done = subprocess.run(
                    [*command, "-o", str(temporary)], check=True, capture_output=True, encoding="utf-8"
                )
                log.write_text(done.stderr, encoding="utf-8")
                temporary.rename(output)
    return log.read_text(encoding="utf-8") if log.exists() else ""


def _compilation(source: pathlib.Path, flags: tuple[str, ...]) -> tuple[list[str], pathlib.Path]:
    """The command that compiles a source, and the object that it makes."""
    files = _with_includes(source)
    contents = (part for f in files for part in (f.name, f.read_bytes()))
    key = _digest(compiler(), _compiler_version(compiler()), *COMMON, *flags, *contents)
    output = OUTPUT / "objects" / f"{source.stem}-{key}.o"
    includes = [f"-I{folder}" for folder in INCLUDES]
    return [compiler(), "-x", "c++", *COMMON, *flags, *includes, "-c", str(source)], output


def _make_what_is_free(compilations: list[tuple[list[str], pathlib.Path]]) -> None:
    """Compiles what no other process is compiling: test workers that want the same library share its units."""
    for compilation in compilations:
        with contextlib.suppress(Timeout, subprocess.CalledProcessError):
            _run_once(*compilation, patience=0)


def build(flavour: str, warp_size: int, sources: list[pathlib.Path] | None = None) -> Library:
    """Builds one library.

    Args:
        flavour: "plain", "asan" (AddressSanitizer and UBSan) or "race" (missing barriers).
        warp_size: 32 or 64.
        sources: device sources; None: all of csrc/device.

    Raises:
        subprocess.CalledProcessError: the executor itself does not compile or link.
    """
    kind = FLAVOURS[flavour]
    width = f"-DGPU_WARP_SIZE={warp_size}"
    engine = [_compilation(TESTING / name, (*kind.engine_flags, width)) for name in kind.engine]
    wanted = device_sources() if sources is None else sources
    units = {source.stem: _compilation(source, (*kind.kernel_flags, width)) for source in wanted}
    _make_what_is_free([*engine, *units.values()])
    library = Library(OUTPUT)
    for compilation in engine:
        _run_once(*compilation)
    objects = [output for _, output in engine]
    for unit, (command, output) in units.items():
        try:
            messages = _run_once(command, output)
        except subprocess.CalledProcessError as error:
            library.failures[unit] = error.stderr
            continue
        objects.append(output)
        if messages:
            library.warnings[unit] = messages
    key = _digest(*(path.name for path in objects), *kind.link_flags)
    library.path = OUTPUT / f"{flavour}-{warp_size}-{key}.so"
    command = [
        compiler(),
        "-shared",
        "-Wl,-z,defs",
        *kind.link_flags,
        *map(str, objects),
        "-ldl",
        "-lpthread",
        "-lrt",
    ]
    _run_once(command, library.path)
    return library


def sanitizer_preload() -> str:
    """LD_PRELOAD for a process that is to load a library of flavour "asan"."""

    def path(name: str) -> str:
        return subprocess.run(
            [compiler(), f"-print-file-name={name}"], check=True, capture_output=True, text=True
        ).stdout.strip()

    return f"{path('libasan.so')}:{path('libubsan.so')}"


def main() -> int:
    """Builds the flavour and warp size named on the command line, prints the path."""
    flavour, warp_size = (sys.argv + ["plain", "32"][len(sys.argv) - 1 :])[1:3]
    library = build(flavour, int(warp_size))
    for unit, text in library.failures.items():
        print(f"{unit} does not compile:\n{text}", file=sys.stderr)
    print(library.path)
    return 1 if library.failures else 0


if __name__ == "__main__":
    sys.exit(main())
