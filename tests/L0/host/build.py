"""Compiles the host library and the fake drivers for the tests, each file once per content (under build/)."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
HOST = ROOT / "csrc" / "host"
FAKES = Path(__file__).parent / "fakes"
STORE = Path(os.environ.get("APEX_STORE") or ROOT / "build" / "store").absolute() / "tests" / "host"

COMPILER = os.environ.get("CXX", "g++")
COMPILE = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden", "-fPIC"]
INCLUDE = ["-I", str(ROOT / "csrc"), "-I", str(HOST)]
HOST_COMPILE = [*COMPILE, "-include", str(HOST / "compat" / "old_glibc.h"), *INCLUDE]
HOST_LINK = [
    "-shared",
    f"-Wl,--version-script={HOST / 'apex.map'}",
    "-Wl,--no-undefined",
    "-Wl,--no-as-needed",
    "-l:libdl.so.2",
    "-Wl,--as-needed",
]


def level_flags(source: Path) -> list[str]:
    """-march of a CPU variant: its file name ends in the level (adam_v3.cpp)."""
    for level in ("v2", "v3", "v4"):
        if source.stem.endswith(f"_{level}"):
            return [f"-march=x86-64-{level}"]
    return []


def run(command: list[str]) -> None:
    """Runs a compiler. Raises RuntimeError with what it said."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def cached(name: str, inputs: list[Path], command: list[str], compiler: str = COMPILER) -> Path:
    """The file `name`, made by `command` (+ -o file) unless it was made from the same content before."""
    digest = hashlib.sha256("\0".join([name, compiler, *command]).encode())
    for path in inputs:
        digest.update(path.read_bytes())
    folder = STORE / digest.hexdigest()[:20]
    made = folder / name
    if not made.exists():
        scratch = STORE / f"{folder.name}.{os.getpid()}"
        scratch.mkdir(parents=True, exist_ok=True)
        run([compiler, *command, "-o", str(scratch / name)])
        try:
            scratch.rename(folder)
        except OSError:  # another test run was quicker
            shutil.rmtree(scratch)
    return made


def compile_object(source: Path, flags: list[str], headers: list[Path]) -> Path:
    """One object file; it is made again when any of `headers` changes."""
    return cached(f"{source.stem}.o", [source, *headers], [*flags, "-c", str(source)])


def host_sources() -> list[Path]:
    """Every source of libapex.so."""
    return [
        *sorted(HOST.glob("*.cpp")),
        *sorted((HOST / "cpu").glob("*.cpp")),
        HOST / "compat" / "libstdcxx.cpp",
    ]


def headers() -> list[Path]:
    """Every header that a source of libapex.so may include."""
    return sorted((ROOT / "csrc").glob("*/**/*.h"))


def host_objects(sources: list[Path]) -> list[Path]:
    """Their object files."""
    return [compile_object(source, [*HOST_COMPILE, *level_flags(source)], headers()) for source in sources]


def described() -> Path:
    """The generated source in which the library describes its interface, by content."""
    sys.path.insert(0, str(ROOT))
    from build_matrix.parts import interface

    text = interface.source().encode()
    source = STORE / f"interface-{hashlib.sha256(text).hexdigest()[:20]}" / "interface.cpp"
    if not source.exists():
        source.parent.mkdir(parents=True, exist_ok=True)
        scratch = source.with_name(f"{os.getpid()}.cpp")
        scratch.write_bytes(text)
        scratch.replace(source)
    return source


def build_library() -> Path:
    """libapex.so of this tree."""
    objects = host_objects([*host_sources(), described()])
    return cached("libapex.so", [*objects, HOST / "apex.map"], [*map(str, objects), *HOST_LINK])


def build_shared(file_name: str, source: Path, flags: list[str] = (), soname: str | None = None) -> Path:
    """A shared library of one source (a fake driver, say); its soname is the file name unless given."""
    soname_flag = f"-Wl,-soname,{soname or file_name}"
    return cached(
        file_name,
        [source, *sorted(FAKES.glob("*.h"))],
        [*COMPILE, "-shared", str(source), soname_flag, *flags],
    )


if __name__ == "__main__":
    sys.stdout.write(f"{build_library()}\n")


def check_library() -> Path:
    """libapex with a few more exports (host_check.cpp)."""
    source = Path(__file__).with_name("host_check.cpp")
    objects = [*host_objects(host_sources()), *host_objects([source])]
    link = [flag for flag in HOST_LINK if "version-script" not in flag]
    return cached("libcheck.so", objects, [*map(str, objects), *link])
