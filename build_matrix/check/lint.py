"""Lint, which is this list of commands: `python -m build_matrix lint` runs it, and with it `nox -s lint`, the
tests of a change and the release check. .pre-commit-config.yaml has those of them that look at single files."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from build_matrix import REPOSITORY

ITSELF = (sys.executable, "-m", "build_matrix", "lint")
PYTHON = (sys.executable, "-m")
NATIVE = ("csrc", "tests")  # where C++ stands
SUFFIXES = (".cpp", ".h", ".cu")
SCRIPTS = (".ci", "ci", "examples", "scripts")  # where shell scripts stand


def commands() -> dict[str, tuple[str, ...]]:
    """The list, in order: the quickest first."""
    return {
        "ruff check": (*PYTHON, "ruff", "check", "."),
        "ruff format": (*PYTHON, "ruff", "format", "--check", "."),
        "clang-format": (_program("clang-format"), "--dry-run", "-Werror", *native_sources()),
        "shellcheck": (_program("shellcheck"), "--external-sources", *shell_scripts()),
        "line length": (*PYTHON, "build_matrix.check.line_length"),
        "mypy": (*PYTHON, "mypy"),
    }


def native_sources() -> list[str]:
    """Files of C++, CUDA and HIP."""
    return sorted(path for path in _files(NATIVE) if path.endswith(SUFFIXES))


def shell_scripts() -> list[str]:
    """Files that begin with a shell's name, whatever they are called."""
    return sorted(path for path in _files(SCRIPTS) if _first_line(REPOSITORY / path).endswith(("bash", "sh")))


def _files(folders: tuple[str, ...]) -> Iterator[str]:
    """Files, relative to the checkout, but for outputs."""
    for folder in folders:
        for path in (REPOSITORY / folder).rglob("*"):
            if path.is_file() and "out" not in path.relative_to(REPOSITORY).parts:
                yield path.relative_to(REPOSITORY).as_posix()


def _first_line(path: Path) -> str:
    with path.open("rb") as file:
        line = file.readline(200)
    return line.decode("utf-8", "replace").strip() if line.startswith(b"#!") else ""


def _program(name: str) -> str:
    """Its path: beside this Python, where pip puts it, else on PATH."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name) or name


def run() -> bool:
    """Runs all of it; whether all held. Says how long each took, and what mends a program that is not here."""
    held = True
    for name, command in commands().items():
        start = time.monotonic()
        try:
            code = subprocess.run(command, cwd=REPOSITORY).returncode
        except OSError as error:
            print(f"{command[0]}: {error.strerror}. Run: nox -s lint, which brings it", file=sys.stderr)
            code = 1
        verdict = "failed" if code else "holds"
        print(f"lint: {name} {verdict}, {time.monotonic() - start:.1f} s", file=sys.stderr)
        held &= code == 0
    return held
