"""Interpreters: where the headers of a Python are, and how it names an extension module."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from build_matrix.errors import PythonMissing
from build_matrix.spec import matrix

ASK = (
    "import json, sys, sysconfig; print(json.dumps([f'cp{sys.version_info[0]}{sys.version_info[1]}', "
    "sys.version.split()[0], sysconfig.get_path('include'), sysconfig.get_config_var('EXT_SUFFIX')]))"
)


@dataclass(frozen=True)
class Python:
    """An interpreter that is here, and where its headers are."""

    tag: str
    version: str
    include: Path
    suffix: str
    program: str

    @property
    def also(self) -> list[Path]:
        """Where Debian keeps the pyconfig.h of a processor that its own includes."""
        return sorted(self.include.parent.glob(f"*/{self.include.name}"))

    def suffix_on(self, platform: str) -> str:
        """What an extension module for this Python ends in there: .cpython-311-aarch64-linux-gnu.so"""
        own, other = (name.removeprefix("linux_") for name in (matrix.NATIVE, platform))
        return self.suffix.replace(f"-{own}-", f"-{other}-")


def own_tag() -> str:
    """cp311: of the interpreter that runs this."""
    return f"cp{sys.version_info[0]}{sys.version_info[1]}"


@cache
def find(tag: str) -> Python:
    """The interpreter of `cp311`: this one, APEX_PYTHON_cp311, python3.11 on PATH, or one of pyenv's.

    Raises PythonMissing when there is none with headers.
    """
    bare = ""
    version = matrix.dotted(tag)
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    places = [
        sys.executable if tag == own_tag() else None,
        os.environ.get(f"APEX_PYTHON_{tag}"),
        shutil.which(f"python{version}"),
        *sorted(map(str, pyenv.glob(f"{version}.*/bin/python")), reverse=True),
    ]
    for place in filter(None, places):
        try:
            answer = subprocess.run([place, "-c", ASK], text=True, capture_output=True, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            continue  # pyenv's shims are on PATH even for versions that are not chosen
        name, full, include, suffix = json.loads(answer)
        if name == tag and (Path(include) / "Python.h").is_file():
            return Python(tag, full, Path(include), suffix, place)
        bare = bare or (place if name == tag else "")
    raise PythonMissing(tag, bare)
