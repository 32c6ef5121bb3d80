"""Which tests look at which sources, by names alone: an op's kernel, launcher, binding, Python face and test bear its
name, and a test names the modules that it imports. What this does not see, the moving slice runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path, PurePosixPath

from build_matrix import REPOSITORY

SOURCES = ("apex", "csrc", "build_matrix", "tests", "examples", "benchmarks", "ci")
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
MODULES = ("apex/", "build_matrix/", "examples/", "benchmarks/", "ci/")


def everything() -> list[str]:
    """Every source of this checkout: what has changed where no commit is known."""
    found = (path for folder in SOURCES for path in (REPOSITORY / folder).rglob("*"))
    return sorted(
        path.relative_to(REPOSITORY).as_posix()
        for path in found
        if path.suffix in (".py", ".cu", ".h", ".cpp", ".toml", ".schemas") and path.is_file()
    )


def units(changed: Iterable[str]) -> set[str]:
    """Device units of which a source, or a header that they include, was changed."""
    names = {PurePosixPath(path).name for path in changed if path.startswith("csrc/")}
    return {path.stem for path in (REPOSITORY / "csrc/device").glob("*.cu") if names & _includes(path)}


@cache
def _includes(path: Path) -> frozenset[str]:
    """Names of a file and of what it includes, directly or not."""
    found = {path.name}
    for name in INCLUDE.findall(path.read_text(encoding="utf-8")):
        for folder in (path.parent, REPOSITORY / "csrc", REPOSITORY / "csrc/device"):
            if (folder / name).is_file():
                found |= _includes((folder / name).resolve())
                break
    return frozenset(found)


def tests(changed: Iterable[str]) -> set[str]:
    """Files of tests, relative to the checkout, that were changed or that name what was."""
    changed = list(changed)
    words = units(changed) | {PurePosixPath(path).stem for path in changed if path.startswith("csrc/")}
    modules = {name for path in changed if path.endswith(".py") for name in _offers(path)}
    helpers = {PurePosixPath(p).stem for p in changed if p.startswith("tests/") and p.endswith(".py")}
    found = set()
    for path in (REPOSITORY / "tests").rglob("test_*.py"):
        name = path.relative_to(REPOSITORY).as_posix()
        said = _says(path)
        if name in changed or words & said.words or modules & said.imports or helpers & said.imports:
            found.add(name)
    return found


def _offers(path: str) -> set[str]:
    """What one may import of a module of the sources: itself, and its public names from each package above it."""
    if not path.startswith(MODULES) or not (REPOSITORY / path).is_file():
        return set()
    parts = list(PurePosixPath(path).with_suffix("").parts)
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    tree = ast.parse((REPOSITORY / path).read_text(encoding="utf-8"))
    kinds = (ast.ClassDef, ast.FunctionDef)
    public = [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
    above = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    return {".".join(parts), *(f"{package}.{name}" for package in above for name in public)}


class _Said:
    """Words of a test's text, and what it and the helpers beside it import."""

    def __init__(self, path: Path):
        text = path.read_text(encoding="utf-8")
        self.words = frozenset({*re.findall(r"\w+", text), path.stem.removeprefix("test_")})
        self.imports = _imports(path)


@cache
def _says(path: Path) -> _Said:
    return _Said(path)


@cache
def _imports(path: Path, depth: int = 2) -> frozenset[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found |= {module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)}
    if depth:
        for name in list(found):
            helper = path.parent / f"{name.rpartition('.')[2]}.py"
            if helper.is_file() and helper != path:
                found |= _imports(helper, depth - 1)
    return frozenset(found)
