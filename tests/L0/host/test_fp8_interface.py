"""The FP8 functions of the C interface, called by a program that has neither torch nor Python (fp8_check.cpp)."""

import subprocess

from . import build

SOURCE = build.Path(__file__).with_name("fp8_check.cpp")


def test_a_program_of_its_own(library, tmp_path):
    program = tmp_path / "fp8_check"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", *build.INCLUDE, str(SOURCE), str(library)]
    build.run([build.COMPILER, *flags, f"-Wl,-rpath,{library.parent}", "-o", str(program)])
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
