"""What libapex.so exports, needs and calls: read from the file."""

import re
import subprocess

import pytest

from . import build

# manylinux_2_28, as auditwheel's policy has it.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (8,)}
SYSTEM_LIBRARIES = re.compile(r"(libc|libm|libdl|libpthread|libstdc\+\+|libgcc_s|ld-linux-x86-64)\.so\.\d+")
ENDS_THE_PROCESS = re.compile(
    r"_?exit|_Exit|quick_exit|abort|raise|kill|tgkill|__assert_fail|_ZSt9terminatev|__chk_fail"
)
OWN_THREADS = re.compile(
    r"pthread_create|_ZNSt6thread.*|GOMP_.*|omp_.*|__kmpc.*|fork|vfork|posix_spawn.*|system|popen"
)


def lines(*command):
    """Words of each line that a tool printed."""
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line.split() for line in done.stdout.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def undefined(library):
    """Names of the symbols it takes from others."""
    return {words[-1].split("@")[0] for words in lines("nm", "-D", "--undefined-only", str(library))}


def test_exports_are_the_c_interface(library):
    """Every function that a header declares as exported, XLA's handlers (xla.h), and nothing else."""
    exported = {words[-1].split("@")[0] for words in lines("nm", "-D", "--defined-only", str(library))}
    declared = set()
    for header in build.HOST.glob("*.h"):
        declared |= set(re.findall(r"APEX_EXPORT\s[^;(]*?\b(apex_\w+)\s*\(", header.read_text()))
    for source in build.HOST.glob("xla_*.cpp"):
        for op in re.findall(r"APEX_XLA_HANDLER\((\w+)", source.read_text()):
            declared |= {f"apex_xla_{op}_{platform}" for platform in ("cpu", "cuda", "hip")}
    assert {"apex_launch", "apex_xla_rms_norm_forward_cpu"} <= declared
    assert exported == declared


def test_needs_the_systems_libraries_only(library):
    """No torch, Python or vendor's library. libdl is named for glibc before 2.34, whose dlopen is in it."""
    needed = {words[-1].strip("[]") for words in lines("readelf", "-d", str(library)) if "(NEEDED)" in words}
    assert {name for name in needed if not SYSTEM_LIBRARIES.fullmatch(name)} == set()
    assert "libdl.so.2" in needed


def newest_versions(library):
    """The newest version of each kind of symbol that `library` asks for, where the policy has it not."""
    text = subprocess.run(["objdump", "-T", str(library)], capture_output=True, text=True, check=True).stdout
    found = {}
    for kind, version in re.findall(r"\b(GLIBCXX|GLIBC|CXXABI|GCC)_([\d.]+)", text):
        found.setdefault(kind, set()).add(tuple(map(int, version.split("."))))
    assert "GLIBC" in found
    return {kind: max(versions) for kind, versions in found.items() if max(versions) > NEWEST[kind]}


def test_reaches_manylinux_2_28(library):
    """Loads where the wheel's tag says it does."""
    assert newest_versions(library) == {}


def test_never_ends_the_process(undefined):
    """No call of exit, abort and the like."""
    assert {name for name in undefined if ENDS_THE_PROCESS.fullmatch(name)} == set()


def test_has_no_threads_of_its_own(undefined):
    """Nor processes."""
    assert {name for name in undefined if OWN_THREADS.fullmatch(name)} == set()


def test_header_is_c():
    """apex.h compiles as C11 and as C++11, alone."""
    header = str(build.HOST / "apex.h")
    for language, standard in (("c", "c11"), ("c++", "c++11")):
        command = [
            build.COMPILER,
            "-x",
            language,
            f"-std={standard}",
            "-Wall",
            "-Wextra",
            "-pedantic",
            "-Werror",
        ]
        build.run([*command, "-fsyntax-only", "-include", header, "/dev/null"])
