"""The C++ compiler of the machine, and the cross compilers of other platforms: version, digest, compiling one file,
linking a library that fits manylinux_2_28, or one for Windows."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

from build_matrix import REPOSITORY
from build_matrix.errors import BuildError, CompileError, ToolchainMissing
from build_matrix.spec import matrix
from build_matrix.store import DigestCache
from build_matrix.toolchains import inputs

COMPAT = REPOSITORY / "csrc/host/compat"
# Nothing of this machine may enter an output: not a path, not a date, not the order of a folder.
REPRODUCIBLE = [f"-ffile-prefix-map={REPOSITORY}=.", "-g0", "-fno-ident"]
# A dll holds the compiler's own libraries, no date, and no number made of the name of its folder (the base).
WINDOWS_LINK = [
    "-static",
    "-Wl,--no-insert-timestamp",
    "-Wl,--image-base=0x180000000",
    "-Wl,--nxcompat",
    "-Wl,--dynamicbase",
    "-Wl,--high-entropy-va",
]


class HostCompiler:
    """A g++ or clang++. Raises BuildError for a program that does not run, or is no compiler."""

    def __init__(self, path: str):
        self.path = path
        self.version = self._say("-dumpfullversion", "-dumpversion")

    def _say(self, *arguments: str) -> str:
        try:
            said = self.read("", *arguments)
        except OSError as error:
            raise BuildError(
                f"{self.path} does not run here: {error.strerror}; CXX names the compiler"
            ) from None
        if said.returncode:
            raise BuildError(f"{self.path} is no C++ compiler: it refuses {arguments[0]}; CXX names another")
        return said.stdout.strip()

    def read(self, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """What it says when it has `text` on its standard input. Its words are UTF-8 in whatever locale this runs."""
        return _run([self.path, *arguments], input=text)

    @property
    def name(self) -> str:
        """clang++, g++, or g++-aarch64 where it compiles for another processor, g++-mingw for Windows."""
        name = "clang++" if "clang" in self._say("--version") else "g++"
        machine, _, system = self._say("-dumpmachine").partition("-")
        if "mingw" in system:
            return f"{name}-mingw"
        return name if f"linux_{machine}" == matrix.NATIVE else f"{name}-{machine}"

    def describe(self) -> dict[str, str]:
        """As build.json says it. The digest covers the compiler proper, the assembler and the linker."""
        return {"name": self.name, "version": self.version, "sha256": _digest(self.path)}

    def compile(self, source: Path, output: Path, flags: list[str]) -> list[str]:
        """Compiles one file to an object. Returns the files that it read. Raises CompileError."""
        # The last prefix map that fits counts: those of `flags` are closer than the checkout's.
        rule = output.with_name(f".{output.name}.d")
        command = [self.path, "-c", *REPRODUCIBLE, *flags, "-MD", "-MT", "it", "-MF", str(rule)]
        try:
            self._run(source.name, [*command, str(source), "-o", str(output)])
            return inputs.of_rule(rule.read_text(encoding="utf-8", errors="surrogateescape"))
        finally:
            rule.unlink(missing_ok=True)

    def link(self, objects: list[Path], output: Path, flags: list[str]) -> list[str]:
        """Links a shared library without symbols that its dynamic table does not need. Returns the objects and archives
        that the linker read. Raises CompileError."""
        names = [str(path) for path in objects]
        of_system = WINDOWS_LINK if output.suffix == ".dll" else ["-Wl,--build-id=none", "-Wl,-z,noexecstack"]
        fixed = ["-Wl,-s", *of_system, "-Wl,--trace"]
        said = self._run(output.name, [self.path, "-shared", *names, "-o", str(output), *fixed, *flags])
        return inputs.of_trace(said)

    def program(self, source: Path, output: Path) -> None:
        """Compiles a program of one file, which needs no library of the compiler's where it runs. Raises
        CompileError."""
        self._run(source.name, [self.path, "-static", str(source), "-o", str(output)])

    def stub(self, soname: str, folder: Path) -> None:
        """An empty library with a soname: linking needs the name of torch's libraries, never their
        contents."""
        command = [self.path, "-shared", "-nostdlib", "-x", "c++", "/dev/null", f"-Wl,-soname,{soname}"]
        self._run(soname, [*command, "-o", str(folder / soname)])

    def _run(self, what: str, command: list[str]) -> str:
        result = _run(command)
        if result.returncode:
            raise CompileError(what, command, result.stderr)
        return result.stdout


def _run(command: list[str], **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, encoding="utf-8", errors="replace", capture_output=True, **more)


@cache
def _digest(path: str) -> str:
    programs = [shutil.which(path)]
    for program in ("cc1plus", "as", "ld"):
        found = _run([path, f"-print-prog-name={program}"]).stdout.strip()
        programs.append(shutil.which(found))
    return DigestCache().of_files(sorted({Path(program).resolve() for program in programs if program}))


@cache
def find(platform: str = matrix.NATIVE) -> HostCompiler:
    """CXX, else g++, else clang++; for another platform its cross compiler: APEX_CXX_aarch64, else what Debian calls
    it. Raises ToolchainMissing, and BuildError where a variable names what is no program."""
    if platform != matrix.NATIVE:
        return _cross(matrix.load().platform(platform))
    if named := _named("CXX"):
        return named
    for name in ("g++", "c++", "clang++"):
        if path := shutil.which(name):
            return HostCompiler(path)
    raise ToolchainMissing("a C++ compiler", "apt-get install g++")


def _cross(platform: matrix.Platform) -> HostCompiler:
    if named := _named(f"APEX_CXX_{platform.machine}"):
        return named
    if path := shutil.which(platform.compiler):
        return HostCompiler(path)
    raise ToolchainMissing(platform.toolchain, f"nox -s toolchain -- {platform.toolchain}")


def _named(variable: str) -> HostCompiler | None:
    """The compiler that a variable names; another is not taken in its place."""
    if not (name := os.environ.get(variable)):
        return None
    if path := shutil.which(name):
        return HostCompiler(path)
    raise BuildError(
        f"{variable} names {name}, which is no program here: name one without options, or unset it"
    )


def compat_sources() -> list[Path]:
    """What every library links so that it loads on glibc 2.28 and GCC 8's libstdc++."""
    return sorted(COMPAT.glob("*.cpp"))
