"""apex.dll: what it exports and needs, and its C interface called by programs for Windows under wine, which is no
Windows: what passes here is loaded under wine, and no more."""

import shutil
import subprocess
from pathlib import Path

import pytest

from apex._loader.elf import Elf
from apex._loader.pe import Pe
from build_matrix.errors import GateError, ToolchainMissing
from build_matrix.parts import host_library, interface
from build_matrix.store import Store
from build_matrix.toolchains import host_compiler, windows, wine

from . import build

WINDOWS = "win_amd64"
FOLDER = Path(__file__).parent
FLAGS = ["-std=c++20", "-O1", "-w", "-static"]


@pytest.fixture(scope="module")
def mingw():
    try:
        return host_compiler.find(WINDOWS)
    except ToolchainMissing as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def dll(mingw):
    """apex.dll of this tree, as wheels hold it."""
    store = Store()
    return store.build(host_library.build(store, platform=WINDOWS)).folder / "apex.dll"


@pytest.fixture(scope="module")
def under_wine():
    """Runs a program for Windows in its folder: exit status and output."""
    if not shutil.which("wine"):
        pytest.skip(f"no wine: {wine.REMEDY}")
    with wine.running() as start:

        def run(path, *arguments):
            done = start(path, *arguments)
            return done.returncode, done.stdout

        yield run


@pytest.fixture
def program(mingw, dll, tmp_path):
    """Compiles one of this folder's programs, and lays it beside the library."""
    shutil.copy(dll, tmp_path)

    def compile(name):
        source = FOLDER / f"{name}.cpp"
        inputs = [source, dll, FOLDER / "fp8_values.h", *build.headers()]
        command = [*FLAGS, *build.INCLUDE, str(source), str(dll)]
        return Path(shutil.copy(build.cached(f"{name}.exe", inputs, command, mingw.path), tmp_path))

    return compile


def fake_driver(mingw, folder, *flags):
    """The fake driver, under the name of NVIDIA's."""
    source = build.FAKES / "fake_cuda.cpp"
    inputs = [source, *sorted(build.FAKES.glob("*.h"))]
    shutil.copy(
        build.cached("nvcuda.dll", inputs, [*FLAGS, "-shared", str(source), *flags], mingw.path), folder
    )


# ---- the file ----------------------------------------------------------------------------------------------


def test_it_exports_what_the_library_for_linux_does(dll, library):
    exported = Pe.read(dll).exports()
    assert {s.name for s in Elf.read(library).symbols(dynamic=True) if s.defined} == set(exported)
    assert "apex_launch" in exported and exported == sorted(exported)


def test_it_needs_what_every_windows_has(dll, mingw, tmp_path):
    assert windows.faults(dll) == []
    assert {name.lower() for name in Pe.read(dll).imports()} == {"kernel32.dll", "msvcrt.dll"}
    source = tmp_path / "source.cpp"
    source.write_text(
        '#include <mutex>\n#include <string>\nextern "C" int f(int x) {\n'
        "  static std::mutex one;\n  std::lock_guard<std::mutex> held(one);\n  return std::to_string(x).size();\n}\n"
    )
    command = [mingw.path, "-shared", str(source), "-o", str(tmp_path / "other.dll")]
    build.run(command)
    assert any(fault.startswith("needs lib") for fault in windows.faults(tmp_path / "other.dll"))
    with pytest.raises(GateError, match=r"other\.dll"):
        windows.check(tmp_path / "other.dll")


ALIGNED = {"vmovaps", "vmovapd", "vmovdqa", "vmovdqa32", "vmovdqa64"}


def aligned_moves(path):
    """Instructions that fault unless an AVX register's memory is aligned to its size."""
    objdump = shutil.which("x86_64-w64-mingw32-objdump") or "objdump"
    command = [objdump, "--disassemble", "--no-show-raw-insn", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as said:
        words = (line.split() for line in said.stdout if "ymm" in line or "zmm" in line)
        return sum(line[1] in ALIGNED and "(" in line[-1] for line in words)


def test_no_move_of_an_avx_register_needs_an_aligned_stack(dll, mingw, tmp_path):
    """Windows aligns stacks to 16 bytes."""
    assert aligned_moves(dll) == 0
    source = tmp_path / "source.cpp"
    source.write_text(
        'void f(float* x) { asm volatile("vmovaps (%0), %%ymm0" ::"r"(x) : "xmm0", "memory"); }\n'
    )
    for flags, found in (([], True), (host_library.WINDOWS_FLAGS, False)):
        command = [mingw.path, "-O1", "-c", str(source), *flags, "-o", str(tmp_path / "object.o")]
        build.run(command)
        assert (aligned_moves(tmp_path / "object.o") > 0) is found


def test_its_bytes_are_the_same_again(dll, mingw, tmp_path):
    objects = [tmp_path / "cpu_level.o"]
    (source,) = [path for path in host_library.sources(WINDOWS) if path.stem == "cpu_level"]
    made = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        mingw.compile(source, objects[0], host_library.flags(source, WINDOWS))
        mingw.link(objects, tmp_path / name / "apex.dll", [])
        made.append((tmp_path / name / "apex.dll").read_bytes())
    assert made[0] == made[1]


# ---- under wine --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp8_check", "fp8_layers_check"])
def test_programs_of_the_c_interface(program, under_wine, name):
    assert under_wine(program(name)) == (0, "")


def test_cpu_variants_of_every_level(program, under_wine):
    done, said = under_wine(program("windows_check"), "cpu")
    level, digest = said.split("\n")[:2]
    assert done == 0 and level.startswith("level "), said
    assert digest.strip() == f"interface {interface.digest(interface.description())}"


def test_without_a_driver(program, under_wine):
    assert under_wine(program("windows_check"), "no driver") == (0, "")


def test_an_old_driver(program, under_wine, mingw, tmp_path):
    fake_driver(mingw, tmp_path, "-DFAKE_BEFORE_CUDA_12")
    assert under_wine(program("windows_check"), "old driver") == (0, "")


@pytest.mark.parametrize("what", ["driver", "vendor"])
def test_a_driver(program, under_wine, mingw, tmp_path, what):
    """Launches through nvcuda.dll; vendors' libraries by Windows' names, in a folder with letters of other scripts."""
    fake_driver(mingw, tmp_path)
    assert under_wine(program("windows_check"), what) == (0, "")
