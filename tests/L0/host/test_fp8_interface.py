"""The FP8 functions of the C interface, called by programs that have neither torch nor Python (fp8_*check.cpp)."""

import subprocess

import pytest

from . import build

FOLDER = build.Path(__file__).parent


@pytest.mark.parametrize("name", ["fp8_check", "fp8_layers_check"])
def test_a_program_of_its_own(library, tmp_path, name):
    program = tmp_path / name
    flags = [
        "-std=c++17",
        "-O1",
        "-Wall",
        "-Wextra",
        *build.INCLUDE,
        str(FOLDER / f"{name}.cpp"),
        str(library),
    ]
    build.run([build.COMPILER, *flags, f"-Wl,-rpath,{library.parent}", "-o", str(program)])
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
