"""Where the packages of the farm are missing: the look-ups and lint run without them, and every other command says in
one line what runs it."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Callable

from build_matrix import REPOSITORY
from build_matrix.check import lint
from build_matrix.errors import BuildError
from build_matrix.serve import compat, which
from build_matrix.spec import toml

RUNS: dict[str, Callable[[list[str]], int]] = {
    "which": which.main,
    "compat": compat.main,
    "lint": lambda arguments: not lint.run(),
}
SESSIONS = {  # command -> the nox session that brings an environment for it
    "wheel": "build-cpu",
    "index": "serve-index",
    "publish": "publish",
    "variants": "variants",
    "bake": "bake-cpu",
    "serve": "serve-index",
    "toolchain": "toolchain",
    "quickstart": "quickstart",
    "ensure-torch": "tests",
    "farm": "farm",
    "plan": "plan",
    "verify": "verify",
    "tests": "tests",
    "tier": "L0(cpu)",
    "release-check": "release-check",
}


def run(arguments: list[str], missing: ModuleNotFoundError) -> int | str:
    """What `python -m build_matrix` does without its packages: the exit code of what runs, or the line."""
    name = arguments[0] if arguments else ""
    if name not in RUNS:
        return words(name, missing)
    try:
        return int(RUNS[name](arguments[1:]))
    except BuildError as error:
        return f"build_matrix: {error}"


def words(command: str, missing: ModuleNotFoundError) -> str:
    """Which command runs it. Raises `missing` again where it is of this repository."""
    session = SESSIONS.get(command)
    if session is None:
        return needs(f"python -m build_matrix {command}".rstrip(), missing)
    brings = "" if importlib.util.find_spec("nox") else "python -m pip install nox && "
    return needs(f"python -m build_matrix {command}", missing, f"{brings}nox -s {shlex.quote(session)}")


def needs(what: str, missing: ModuleNotFoundError, remedy: str = "") -> str:
    """The line for a command that met a missing package. `remedy`: else the line that installs the farm's packages.
    Raises `missing` again where it is of this repository."""
    package = (missing.name or "").partition(".")[0]
    if not package or package in ("build_matrix", "apex"):
        raise missing
    if not remedy:
        group = toml.read(REPOSITORY / "pyproject.toml")["dependency-groups"]["farm"]
        quoted = (
            requirement.replace("'", '"') for requirement in group
        )  # a marker's, within those of a shell
        remedy = f"python -m pip install {shlex.join(quoted)}"
    return f"build_matrix: `{what}` needs {package}, which is not installed here. Run: {remedy}"
