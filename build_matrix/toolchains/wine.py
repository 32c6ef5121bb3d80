"""Wine, which runs programs for Windows here: what loads under it is loaded under wine, and that says no more."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from build_matrix.errors import GateError, ToolchainMissing
from build_matrix.store import files
from build_matrix.toolchains.host_compiler import HostCompiler

REMEDY = "apt-get install wine wine64"
# A program of its own, that knows the library by its file alone.
PROGRAM = """
#include <stdio.h>
#include <windows.h>
int main(int, char** arguments) {
  HMODULE library = LoadLibraryA(arguments[1]);
  if (!library) return printf("error %lu", GetLastError()), 1;
  void* level = (void*)GetProcAddress(library, "apex_set_cpu_level");
  void* digest = (void*)GetProcAddress(library, "apex_interface_digest");
  if (!level || !digest) return printf("it lacks functions"), 1;
  printf("%s at level %d", ((const char* (*)())digest)(), ((int (*)(int))level)(0));
  return 0;
}
"""


@contextmanager
def running() -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Runs programs, each in its folder and by its name, in a Windows of its own that is gone afterwards. Raises
    ToolchainMissing where there is no wine."""
    if not (program := shutil.which("wine")):
        raise ToolchainMissing("wine", REMEDY)
    with files.temporary("wine") as prefix:
        own = {"WINEPREFIX": str(prefix), "WINEDEBUG": "-all"}
        environment = {name: value for name, value in os.environ.items() if name != "DISPLAY"} | own
        how = {
            "env": environment,
            "capture_output": True,
            "encoding": "utf-8",
            "errors": "replace",
            "timeout": 300,
        }
        subprocess.run([program, "wineboot", "--init"], check=True, **how)

        def run(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run([program, path.name, *arguments], cwd=path.parent, **how)

        try:
            yield run
        finally:
            subprocess.run([program, "wineboot", "--kill"], **how)


def load(library: Path, compiler: HostCompiler, digest: str) -> str:
    """Loads a library, in words. Raises GateError where it does not load or describes another interface than `digest`,
    ToolchainMissing where there is no wine."""
    with running() as run, files.temporary("load") as folder:
        shutil.copy(library, folder)
        (folder / "load.cpp").write_text(PROGRAM, encoding="utf-8")
        compiler.program(folder / "load.cpp", folder / "load.exe")
        done = run(folder / "load.exe", library.name)
    if done.returncode or not done.stdout.startswith(f"{digest} "):
        raise GateError(library.name, [f"under wine: exit {done.returncode}, {done.stdout or done.stderr}"])
    return f"{library.name} loads under wine{done.stdout.removeprefix(digest)}"
